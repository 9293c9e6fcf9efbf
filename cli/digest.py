"""The identity of a job's newest checkpoints, read from disk and verified."""

import re
from collections.abc import Iterator
from pathlib import Path

from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.filesystem import LocalFileSystem
from muster.checkpoints.identity import identity_of
from muster.checkpoints.reader import Checkpoint, Reader


def digests(job: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (rank, step, sha256) for every rank that has saved below a job's checkpoint directory.

    Raises a `CheckpointError` if one has nothing intact, or if there is none.
    """
    ranks = _ranks(job)
    if not ranks:
        raise CheckpointDamaged(
            f"{job} holds no rank's checkpoints: name a directory such as ./checkpoints/my-job"
        )
    for rank, directory in ranks:
        checkpoint = newest_checkpoint(directory, rank)
        yield rank, checkpoint.step, identity_of(checkpoint)


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
        number = re.fullmatch(r"worker_(\d+)", directory.name)
        if number:
            found.append((int(number[1]), directory))
    return sorted(found)
