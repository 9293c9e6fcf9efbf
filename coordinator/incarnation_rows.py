"""From what happens to the rows of incarnations: when each began, how it ended, what that means."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from coordinator import actions, happenings
from coordinator.happenings import Happening
from coordinator.moment import Moment
from coordinator.snapshot import JobSnapshot, RankSnapshot
from muster.contracts.messages import Beat, RankExited, RankSaid, RankSpawned, TookUp
from muster.contracts.rank import ProcessState
from store.records import Incarnation, Worker


def incarnations_of(
    before: JobSnapshot, happening: Happening, after: JobSnapshot, now: Moment
) -> list[Incarnation]:
    """Return the rows that a happening has changed, which led from `before` to `after`."""
    return [
        _row(after.ranks[number], _pid(before.ranks[number], after.ranks[number]), now)
        for number in _touched(before, happening, after)
        if after.ranks[number] != before.ranks[number]
    ]


def ended_meanwhile(
    snapshot: JobSnapshot, rows: Sequence[Worker], now: Moment
) -> list[Incarnation]:
    """Return the rows of what ran when a coordinator went away, and is gone for the next one."""
    return [
        _row(snapshot.ranks[row.rank], row.process.pid if row.process else None, now)
        for row in rows
        if row.state != ProcessState.EXITED and not snapshot.ranks[row.rank].is_alive
    ]


def _touched(before: JobSnapshot, happening: Happening, after: JobSnapshot) -> Iterator[int]:
    match happening:
        case happenings.Taken(action=actions.Start(rank=rank)):
            yield rank
        case RankSpawned() | RankExited():
            if 0 <= happening.rank < len(before.ranks):
                yield happening.rank
        case RankSaid(rank=rank, message=Beat() | TookUp()):
            # It says where it is again and again, and where it began once.
            is_known = 0 <= rank < len(before.ranks)
            if is_known and before.ranks[rank].step_at_start != after.ranks[rank].step_at_start:
                yield rank
        case happenings.AgentLost():
            yield from (rank.rank for rank in before.ranks if rank.is_alive)
        case _:
            return


def _pid(before: RankSnapshot, after: RankSnapshot) -> int | None:
    """Return the pid of the present incarnation, which the end of the process takes along."""
    is_same = before.incarnation == after.incarnation
    identity = after.identity or (before.identity if is_same else None)
    return identity.pid if identity else None


def _row(rank: RankSnapshot, pid: int | None, now: Moment) -> Incarnation:
    row = Incarnation(
        rank=rank.rank,
        incarnation=rank.incarnation,
        pid=pid,
        started_at=now.wall_of(rank.spawned_at) or now.wall,
        step_at_start=rank.step_at_start,
    )
    return row if rank.is_alive else _ended(row, rank, now)


def _ended(row: Incarnation, rank: RankSnapshot, now: Moment) -> Incarnation:
    ended = replace(row, ended_at=now.wall, exit_code=rank.exit_code, exit_signal=rank.exit_signal)
    if rank.has_told_step:
        # Who has never said where it began has not come further than there.
        began = rank.step if row.step_at_start is None else row.step_at_start
        ended = replace(ended, step_at_start=began, step_at_end=rank.step)
    if rank.ending is None:
        return ended
    return replace(
        ended,
        retry_class=rank.ending.retry_class,
        reason=rank.ending.reason,
        message=rank.ending.message,
    )
