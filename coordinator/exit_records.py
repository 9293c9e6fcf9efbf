"""What was written down of ends when there was nobody to tell, or no time left to do it."""

from collections.abc import Collection, Iterator

from coordinator.snapshot import JobSnapshot
from muster.contracts.layout import JobFiles
from muster.contracts.messages import RankExited, RankSaid
from muster.exit_records import known_end


def unheard_ends(
    snapshot: JobSnapshot, files: JobFiles, living: Collection[int] = ()
) -> Iterator[RankSaid | RankExited]:
    """Yield what the agents of ranks that are thought to live would have told of their ends.

    `living` are those that were seen to live: the next agent tells of them.
    """
    for rank in snapshot.ranks:
        if rank.is_alive and rank.rank not in living:
            record = known_end(files, rank.rank, rank.incarnation, rank.identity)
            if record is not None:
                yield from record.said
                yield record.exited
