"""Lists the checkpoints in a job's directory: where they are, of which mode, and their condition.

A synchronous job has one model and saves into the job's directory; the ranks of an independent job
save into a directory each below it. A running job saves and deletes meanwhile: a checkpoint that is
gone by the time it is read is left out.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointMissing,
    checkpoint_errors,
)
from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.manifest import (
    LATEST,
    SCHEDULE,
    VIRTUAL_SHARDS,
    CheckpointName,
    Manifest,
)
from muster.checkpoints.reader import Checkpoint, CheckpointReader
from muster.contracts.paths import rank_of_checkpoints
from muster.contracts.spec import Mode

ALL_RANKS: Final = "all ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDir:
    """The directory where one rank, or all ranks together, save checkpoints."""

    label: str  # ``all ranks`` or ``rank 3``
    reader: CheckpointReader
    job_uid: str | None  # the job whose checkpoints count; None: the job that saved here last

    @property
    def rank(self) -> int:
        """The rank that saves here; 0 for all ranks."""
        return self.reader.rank

    @property
    def owner_uid(self) -> str | None:
        """The uid of the job whose checkpoints count."""
        return self.job_uid or self.reader.last_uid()

    def newest(self) -> Checkpoint:
        """Return the checkpoint that a restart would load; raises `CheckpointError`."""
        uid = self.owner_uid
        checkpoint = self.reader.newest(lambda manifest: manifest.job_uid == uid)
        if checkpoint is None:
            raise CheckpointMissing(f"{self.reader.directory} holds no checkpoint of this job yet")
        return checkpoint

    def of_step(self, step: int) -> Checkpoint:
        """Return the most trusted checkpoint of a step, verified; raises `CheckpointError`."""
        names = self.reader.by_trust()
        for name in names:
            if name.step == step:
                return self.reader.load(name)
        steps = ", ".join(str(step) for step in sorted({name.step for name in names}))
        there = f"it has steps {steps}" if steps else "it is empty"
        raise CheckpointMissing(
            f"{self.reader.directory} holds no checkpoint of step {step}: {there}"
        )


class Condition(StrEnum):
    """The condition of a checkpoint after every byte of it was verified."""

    CURRENT = "current"  # intact, and the one that a restart would load
    INTACT = "intact"
    DAMAGED = "damaged"
    FOREIGN = "another job's"
    """Intact, but left by another job in this directory: never restored by this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint of a directory."""

    name: CheckpointName
    condition: Condition
    manifest: Manifest | None  # None if it is damaged
    damage: str = ""  # a sentence that names the file


def checkpoint_dirs(directory: Path, job_uid: str | None = None) -> list[CheckpointDir]:
    """Return the directories of a job's checkpoints by rank; raises `CheckpointMissing` if none.

    `directory` may also be that of one rank. Without `job_uid` the job that saved last counts.
    """
    own_rank = rank_of_checkpoints(directory.name)
    numbered = ((rank_of_checkpoints(path.name), path) for path in directory.glob("worker_*"))
    ranks = sorted((rank, path) for rank, path in numbered if rank is not None)
    places = [(f"rank {rank}", rank, path) for rank, path in ranks]
    if _has_checkpoints(directory):
        label = ALL_RANKS if own_rank is None else f"rank {own_rank}"
        places.append((label, own_rank or 0, directory))
    found = [
        CheckpointDir(
            label=label,
            reader=_reader(path, rank),
            job_uid=job_uid,
        )
        for label, rank, path in places
    ]
    if not found:
        raise CheckpointMissing(
            f"{directory} holds no checkpoints: name a directory such as ./checkpoints/my-job"
        )
    return found


def examine(directory: CheckpointDir) -> Iterator[ListedCheckpoint]:
    """Yield every checkpoint of a directory, most trusted first, after verifying its bytes."""
    reader, own = directory.reader, directory.owner_uid
    has_current = False
    for name in reader.by_trust():
        try:
            manifest = reader.load(name).manifest
        except CheckpointDamaged as damage:
            if name in reader.names():
                yield ListedCheckpoint(
                    name=name, condition=Condition.DAMAGED, manifest=None, damage=str(damage)
                )
            continue
        condition = Condition.INTACT if has_current else Condition.CURRENT
        if manifest.job_uid != own:
            condition = Condition.FOREIGN
        has_current = has_current or condition is Condition.CURRENT
        yield ListedCheckpoint(name=name, condition=condition, manifest=manifest)


def refuse_other_mode(directory: Path, mode: Mode) -> None:
    """Raise `CheckpointMismatch` if a job's directory has checkpoints only of the other mode.

    A job that looked in the wrong place would start from the beginning. A missing directory has no
    checkpoints. Raises another `CheckpointError` if the directory cannot be read.
    """
    with checkpoint_errors("looking into", str(directory)):
        found = set(_modes(directory))
    if not found or mode in found:
        return
    (other,) = found
    raise CheckpointMismatch(
        f"the checkpoints in {directory} are of mode {other}, and a job of mode {mode} cannot "
        f"resume from them: use mode {other}, or start a job with another id and no resume_from"
    )


def values_of_newest(directory: Path) -> Mapping[str, Any]:
    """Return the values of the newest checkpoint of the job that saved last, or nothing.

    Only the manifest is verified. Raises a `CheckpointError` if the directory cannot be read.
    """
    reader = _reader(directory, 0)
    uid = reader.last_uid()
    for name in reader.by_trust():
        with suppress(CheckpointDamaged):
            manifest = reader.manifest(name)
            if manifest.job_uid == uid:
                return manifest.values
    return {}


def refuse_other_schedule(values: Mapping[str, Any], wanted: Mapping[str, int], where: str) -> None:
    """Raise `CheckpointMismatch` if the values of a synchronous checkpoint are of another schedule.

    Other samples would be read, or summed in another order. What an old one lacks is not compared.
    """
    found = {"virtual_shards": values.get(VIRTUAL_SHARDS), **values.get(SCHEDULE, {})}
    other = [name for name, value in wanted.items() if found.get(name) not in (None, value)]
    if other:
        raise CheckpointMismatch(
            f"the checkpoint {where} was made with "
            f"{', '.join(f'{name} {found[name]}' for name in other)}, and this job has "
            f"{', '.join(str(wanted[name]) for name in other)}: the bits would differ. Use the "
            "same values and the same data set, or begin a job that does not resume"
        )


def holds_checkpoints(directory: Path) -> bool:
    """Return whether a job's directory has any checkpoints, intact or not. Raises OSError."""
    return any(_modes(directory))


def _reader(directory: Path, rank: int) -> CheckpointReader:
    return CheckpointReader(
        files=LocalFileSystem(),
        directory=directory,
        rank=rank,
        world_size=None,
        warn=lambda _sentence: None,
    )


def _modes(directory: Path) -> Iterator[Mode]:
    for name in _names_in(directory):
        if _is_checkpoint(name):
            yield "synchronous"
        elif rank_of_checkpoints(name) is not None and any(
            map(_is_checkpoint, _names_in(directory / name))
        ):
            yield "independent"


def _has_checkpoints(directory: Path) -> bool:
    try:
        return any(map(_is_checkpoint, _names_in(directory)))
    except OSError:
        return False


def _is_checkpoint(name: str) -> bool:
    return name == LATEST or CheckpointName.parse(name) is not None


def _names_in(directory: Path) -> list[str]:
    """Return the names in a directory; none if it is missing or not a directory."""
    try:
        return [entry.name for entry in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
