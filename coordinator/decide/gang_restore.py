"""From which checkpoint the ranks of a gang go on, all from the same one. Pure.

Ranks that train in step with each other save one after the other, so a kill in between leaves a
checkpoint that some of them lack. Chosen is the newest that every rank that saves has, by attempt
and step: the same step of two attempts may be of two different models.

A rank that has saved nothing either does not save at all, as in many scripts only rank 0 does, or
has not come to it. How many checkpoints the others have tells which: see `save_lead`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from coordinator.decide import fold_exit
from coordinator.decide.events import printable
from coordinator.decide.state import GangRestore, JobFailure, JobSnapshot, RankSnapshot
from muster.checkpoints.manifest import CheckpointName, RestorePoint
from muster.contracts.job import Reason
from muster.contracts.location import save_lead
from muster.contracts.messages import CheckpointsListed, RankCheckpoints, RestoreFailed

LIST_AGAIN_SECONDS: Final = 5.0
"""Until checkpoints that could not be listed are listed again."""


class NoneInCommon(Exception):
    """The ranks have checkpoints, and none that all have; the message lists them."""


def choose(listed: CheckpointsListed, unusable: frozenset[str]) -> GangRestore:
    """Return from where all ranks go on; `unusable` are restore points that were damaged.

    A job goes on from its own checkpoints, and otherwise from those that it inherits. Raises
    `NoneInCommon`.
    """
    lead = save_lead(in_store=listed.in_store)
    damaged = {RestorePoint.parse(text) for text in unusable}
    for is_inherited, ranks in (False, listed.own), (True, listed.inherited):
        names = {point.name for point in damaged if point.is_inherited == is_inherited}
        if (newest := _newest_in_common(ranks, names, lead)) is not None:
            point = str(RestorePoint(newest, is_inherited))
            return GangRestore(listed.attempt, point, _describe(ranks, newest))
    has_saved = any(rank.intact or rank.damaged for rank in listed.own)
    begins = "all ranks begin again: a checkpoint that only some of them have is set aside"
    return GangRestore(listed.attempt, str(RestorePoint()), begins if has_saved else None)


def record_listing(snapshot: JobSnapshot, listed: CheckpointsListed, now: float) -> JobSnapshot:
    """Decide from where the gang goes on, or when to list again."""
    if listed.attempt != snapshot.next_attempt or not snapshot.is_listing:
        return snapshot
    snapshot = replace(snapshot, is_listing=False)
    if listed.problem is not None:
        again = now + LIST_AGAIN_SECONDS
        ranks = tuple(replace(rank, start_at=max(rank.start_at, again)) for rank in snapshot.ranks)
        return replace(snapshot, ranks=ranks)
    try:
        return replace(snapshot, restore=choose(listed, snapshot.unusable))
    except NoneInCommon as none:
        message = (
            f"the ranks of this gang have no intact checkpoint in common ({none}): restore a copy "
            "of what is missing and start a job with resume_from, or begin again under another "
            "id. Ranks that train apart from each other are no gang: --restart-scope rank"
        )
    failure = JobFailure(reason=Reason.INVALID_CHECKPOINT, message=message, exit_code=1)
    return fold_exit.fail_job(snapshot, failure, now)


def record_damage(snapshot: JobSnapshot, rank: RankSnapshot, failed: RestoreFailed) -> JobSnapshot:
    """A rank could not read the checkpoint that was chosen: the next start takes another one."""
    noted = snapshot.with_rank(replace(rank, warning=printable(failed.message)))
    return replace(noted, unusable=snapshot.unusable | {failed.restore_from})


def _newest_in_common(
    ranks: Sequence[RankCheckpoints], excluded: set[CheckpointName | None], lead: int
) -> CheckpointName | None:
    """Return the newest checkpoint of all ranks that save; None to begin without one."""
    saving = [rank for rank in ranks if rank.intact or rank.damaged]
    most = max((len(rank.intact) + len(rank.damaged) for rank in saving), default=0)
    if not saving or (len(saving) < len(ranks) and most <= lead):
        return None
    common = set.intersection(*({*_parsed(rank)} for rank in saving)) - excluded
    if not common:
        raise NoneInCommon("; ".join(_holdings(ranks)))
    return max(common)


def _describe(ranks: Sequence[RankCheckpoints], newest: CheckpointName) -> str:
    where = f"from step {newest.step} of attempt {newest.generation}"
    saving = [str(number) for number, rank in enumerate(ranks) if rank.intact or rank.damaged]
    if len(saving) == len(ranks):
        return f"all ranks go on {where}, the newest checkpoint that all of them have"
    return (
        f"only rank {', '.join(saving)} of {len(ranks)} ranks saves checkpoints and goes on "
        f"{where}; the others get None from run.restore()"
    )


def _holdings(ranks: Sequence[RankCheckpoints]) -> Iterator[str]:
    """Yield what each rank has, newest first."""
    for number, rank in enumerate(ranks):
        names = sorted(_parsed(rank), reverse=True)
        steps = [f"step {name.step} of attempt {name.generation}" for name in names]
        steps += [f"{text} (damaged)" for text in rank.damaged]
        yield f"rank {number}: {', '.join(steps) or 'none'}"


def _parsed(rank: RankCheckpoints) -> Iterator[CheckpointName]:
    return (name for text in rank.intact if (name := CheckpointName.parse(text)))
