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

    @property
    def rank(self) -> int:
        """The rank that saves here."""
        return self.reader.rank

    def newest(self) -> Checkpoint:
        """Return the newest intact one of whoever saved last; raises a `CheckpointError`."""
        checkpoint = self.reader.newest_of_last_job()
        if checkpoint is None:
            raise CheckpointMissing(f"{self.reader.directory} holds no checkpoint yet")
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


def shelves(directory: Path) -> list[Shelf]:
    """Return where a job's checkpoints lie, by rank; raises `CheckpointMissing` for nowhere.

    The directory may also be that of one rank.
    """
    own_rank = rank_of_checkpoints(directory.name)
    found = [_shelf(rank, path) for rank, path in _ranks(directory)]
    if _holds_any(directory):
        whose = EVERYBODY if own_rank is None else _name(own_rank)
        reader = _reader(directory, own_rank or 0)
        found.append(Shelf(whose=whose, reader=reader))
    if not found:
        raise CheckpointMissing(
            f"{directory} holds no checkpoints: name a directory such as ./checkpoints/my-job"
        )
    return found


def examine(shelf: Shelf, job_uid: str | None = None) -> Iterator[Found]:
    """Yield every checkpoint on a shelf, the most trusted first, each read to its last byte.

    `job_uid` says whose are one's own; without it those of whoever saved last.
    """
    reader = shelf.reader
    own = job_uid or reader.last_uid()
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


def _shelf(rank: int, directory: Path) -> Shelf:
    return Shelf(whose=_name(rank), reader=_reader(directory, rank))


def _reader(directory: Path, rank: int) -> Reader:
    return Reader(
        files=LocalFileSystem(),
        directory=directory,
        rank=rank,
        world_size=None,
        warn=lambda _sentence: None,
    )


def _name(rank: int) -> str:
    return f"rank {rank}"


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
