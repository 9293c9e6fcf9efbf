"""Every checkpoint of a job, for people who look at them: where it lies and whether it is intact.

One model has one shelf, which is the job's directory; ranks that train by themselves have one each
below it. A job that goes on saves and deletes meanwhile: what is gone by the time it is read was
never there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from muster.checkpoints.errors import CheckpointDamaged, CheckpointMissing
from muster.checkpoints.filesystem import LocalFileSystem
from muster.checkpoints.manifest import Manifest
from muster.checkpoints.names import LATEST, CheckpointName
from muster.checkpoints.reader import Checkpoint, Reader
from muster.contracts.layout import rank_of_checkpoints

EVERYBODY: Final = "all ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Where one rank, or all of them together, keep their checkpoints."""

    whose: str
    reader: Reader
    job_uid: str | None
    """The job that they are looked for of; None: whoever saved here last."""

    @property
    def rank(self) -> int:
        """The rank that saves here."""
        return self.reader.rank

    @property
    def owner_uid(self) -> str | None:
        """Whose checkpoints are its own, and not left over from another job."""
        return self.job_uid or self.reader.last_uid()

    def newest(self) -> Checkpoint:
        """Return the newest intact one, what a restart goes on from; raises `CheckpointError`."""
        uid = self.owner_uid
        checkpoint = self.reader.newest(lambda manifest: manifest.job_uid == uid)
        if checkpoint is None:
            raise CheckpointMissing(f"{self.reader.directory} holds no checkpoint of this job yet")
        return checkpoint

    def of_step(self, step: int) -> Checkpoint:
        """Return the most trusted one of a step, verified; raises a `CheckpointError`."""
        names = self.reader.by_trust()
        for name in names:
            if name.step == step:
                return self.reader.load(name)
        steps = ", ".join(str(step) for step in sorted({name.step for name in names}))
        there = f"there are those of {steps}" if steps else "there is none"
        raise CheckpointMissing(
            f"{self.reader.directory} holds no checkpoint of step {step}: {there}"
        )


class Condition(StrEnum):
    """How a checkpoint is, now that every byte of it was read."""

    CURRENT = "current"
    """Intact, and what a restart goes on from."""
    INTACT = "intact"
    DAMAGED = "damaged"
    FOREIGN = "another job's"
    """Intact, and of another job that had this directory: never taken for one's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One checkpoint on a shelf."""

    name: CheckpointName
    condition: Condition
    manifest: Manifest | None
    """None: it is damaged."""
    damage: str = ""
    """A sentence that names the file."""


def shelves(directory: Path, job_uid: str | None = None) -> list[Shelf]:
    """Return where a job's checkpoints lie, by rank; raises `CheckpointMissing` for nowhere.

    The directory may also be that of one rank. Without `job_uid` they are those of whoever saved
    there last.
    """
    own_rank = rank_of_checkpoints(directory.name)
    places = [(f"rank {rank}", rank, path) for rank, path in _ranks(directory)]
    if _holds_any(directory):
        whose = EVERYBODY if own_rank is None else f"rank {own_rank}"
        places.append((whose, own_rank or 0, directory))
    found = [
        Shelf(whose=whose, reader=_reader(path, rank), job_uid=job_uid)
        for whose, rank, path in places
    ]
    if not found:
        raise CheckpointMissing(
            f"{directory} holds no checkpoints: name a directory such as ./checkpoints/my-job"
        )
    return found


def examine(shelf: Shelf) -> Iterator[Found]:
    """Yield every checkpoint on a shelf, the most trusted first, each read to its last byte."""
    reader, own = shelf.reader, shelf.owner_uid
    is_current_told = False
    for name in reader.by_trust():
        try:
            manifest = reader.load(name).manifest
        except CheckpointDamaged as damage:
            if name in reader.names():
                yield Found(
                    name=name, condition=Condition.DAMAGED, manifest=None, damage=str(damage)
                )
            continue
        condition = Condition.INTACT if is_current_told else Condition.CURRENT
        if manifest.job_uid != own:
            condition = Condition.FOREIGN
        is_current_told = is_current_told or condition is Condition.CURRENT
        yield Found(name=name, condition=condition, manifest=manifest)


def _reader(directory: Path, rank: int) -> Reader:
    return Reader(
        files=LocalFileSystem(),
        directory=directory,
        rank=rank,
        world_size=None,
        warn=lambda _sentence: None,
    )


def _ranks(directory: Path) -> list[tuple[int, Path]]:
    paths = directory.glob("worker_*")
    found = ((rank_of_checkpoints(path.name), path) for path in paths)
    return sorted((rank, path) for rank, path in found if rank is not None)


def _holds_any(directory: Path) -> bool:
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:
        return False
    return any(name == LATEST or CheckpointName.parse(name) for name in names)
