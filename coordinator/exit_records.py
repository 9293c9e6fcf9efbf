"""What agents wrote down when there was nobody to tell, or no time left to do it."""

from collections.abc import Iterator

from coordinator.snapshot import JobSnapshot
from muster.contracts.layout import JobFiles
from muster.contracts.messages import RankExited, RankSaid
from muster.exit_records import read_exit_record


def unheard_ends(snapshot: JobSnapshot, files: JobFiles) -> Iterator[RankSaid | RankExited]:
    """Yield what the agents of ranks that are thought to live would have told of their ends."""
    for rank in snapshot.ranks:
        if rank.is_alive:
            record = read_exit_record(files, rank.rank, rank.incarnation, rank.identity)
            if record is not None:
                yield from record.said
                yield record.exited
