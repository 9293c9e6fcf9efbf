"""The identity of a job's newest checkpoints, read from disk and verified."""

from collections.abc import Iterator
from pathlib import Path

from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.filesystem import LocalFileSystem
from muster.checkpoints.identity import identity_of
from muster.checkpoints.names import LATEST
from muster.checkpoints.reader import Checkpoint, Reader
from muster.contracts.layout import rank_of_checkpoints


def digests(job: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (whose, step, sha256) of the newest checkpoints in a job's checkpoint directory.

    Those of every rank, or the one of all ranks of a synchronous job. Raises a `CheckpointError` if
    one has nothing intact, or if there is none.
    """
    places = [(f"rank {rank}", rank, directory) for rank, directory in _ranks(job)]
    if (job / LATEST).exists():
        places.append(("all ranks", 0, job))
    if not places:
        raise CheckpointDamaged(
            f"{job} holds no checkpoints: name a directory such as ./checkpoints/my-job"
        )
    for whose, rank, directory in places:
        checkpoint = newest_checkpoint(directory, rank)
        yield whose, checkpoint.step, identity_of(checkpoint)


def newest_checkpoint(directory: Path, rank: int) -> Checkpoint:
    """Return a rank's newest intact checkpoint; raises a `CheckpointError` if there is none."""
    reader = Reader(
        files=LocalFileSystem(),
        directory=directory,
        rank=rank,
        world_size=None,
        warn=lambda _sentence: None,
    )
    checkpoint = reader.newest_of_last_job()
    if checkpoint is None:
        raise CheckpointDamaged(f"{directory} holds no checkpoint yet")
    return checkpoint


def _ranks(job: Path) -> list[tuple[int, Path]]:
    found = []
    for directory in job.glob("worker_*"):
        rank = rank_of_checkpoints(directory.name)
        if rank is not None:
            found.append((rank, directory))
    return sorted(found)
