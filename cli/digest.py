"""The identity of a job's newest checkpoints, read from disk and verified."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from muster.checkpoints.identity import identity_of
from muster.checkpoints.shelves import Shelf, shelves


def digests(job: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (whose, step, sha256) of the newest checkpoints in a job's checkpoint directory.

    Those of every rank, or the one of all ranks of a synchronous job. Raises a `CheckpointError` if
    one has nothing intact, or if there is none.
    """
    yield from digests_on(shelves(job))


def digests_on(places: Iterable[Shelf]) -> Iterator[tuple[str, int, str]]:
    """Yield the same of the places where they lie."""
    for shelf in places:
        checkpoint = shelf.newest()
        yield shelf.whose, checkpoint.step, identity_of(checkpoint)
