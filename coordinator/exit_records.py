"""What agents wrote down when there was nobody to tell, or no time left to do it."""

from collections.abc import Iterator

from coordinator.snapshot import JobSnapshot
from muster.contracts.exit_record import ExitRecord, decode_exit_record
from muster.contracts.layout import JobFiles
from muster.contracts.messages import RankExited, RankSaid
from muster.contracts.process import ProcessRecord


def unheard_ends(snapshot: JobSnapshot, files: JobFiles) -> Iterator[RankSaid | RankExited]:
    """Yield what the agents of ranks that are thought to live would have told of their ends."""
    for rank in snapshot.ranks:
        if rank.is_alive:
            record = recorded_end(files, rank.rank, rank.incarnation, rank.identity)
            if record is not None:
                yield from record.said
                yield record.exited


def recorded_end(
    files: JobFiles, rank: int, incarnation: int, process: ProcessRecord | None
) -> ExitRecord | None:
    """Return how an incarnation ended; None if nothing that makes sense is on record."""
    try:
        content = files.exit_record(rank, incarnation).read_bytes()
    except OSError:
        return None
    return decode_exit_record(content, None if process is None else process.pid)
