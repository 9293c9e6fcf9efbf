"""The one checkpoint from which all ranks of a gang resume. Pure.

Ranks that train in step with each other save one after the other, so a kill in between leaves a
checkpoint that some of them lack. The newest that every rank that saves has is chosen, by attempt
and step: the same step of two attempts may be of two different models.

A rank that has saved nothing either does not save at all, as in many scripts only rank 0 does, or
was killed before its first save. How many checkpoints others saved in one attempt tells which.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final

from coordinator.decide.events import excerpt
from coordinator.decide.state.job import GangRestore, JobSnapshot
from coordinator.decide.state.job_end import JobFailure
from coordinator.decide.state.rank import RankSnapshot
from coordinator.decide.state.request import RequestState
from muster.checkpoints.manifest import CheckpointName, RestorePoint
from muster.contracts.job.status import Reason
from muster.contracts.location import parse_location, save_lead
from muster.contracts.messages.agent import CheckpointsListed, RankCheckpoints
from muster.contracts.messages.rank import RestoreFailed

LIST_AGAIN_SECONDS: Final = 5.0
"""Until checkpoints that could not be listed are listed again."""

NAMED_LIMIT: Final = 8  # checkpoints of one rank in a message


class NoCommonCheckpoint(Exception):
    """The ranks have checkpoints, and none that all have; the message lists them."""


def choose(snapshot: JobSnapshot, listed: CheckpointsListed) -> GangRestore:
    """Return from where all ranks resume.

    A job resumes from its own checkpoints, and otherwise from those that it inherits. Raises
    `NoCommonCheckpoint`.
    """
    spec = snapshot.spec
    lead = save_lead(parse_location(spec.checkpoint_dir or ""), len(snapshot.hosts))
    # The ranks of another job have ended: those without checkpoints do not save.
    leads = lead, lead if spec.resume_from == snapshot.job_id else 0
    for is_inherited, ranks in (False, listed.own), (True, listed.inherited):
        present = snapshot.restore.point
        known = present.savers if present and present.is_inherited == is_inherited else ()
        damaged = {point.name for point in snapshot.unusable if point.is_inherited == is_inherited}
        missing = [] if is_inherited else _missing(snapshot, ranks)
        found = _newest_in_common(ranks, damaged, leads[is_inherited], known, missing)
        if found is not None:
            newest, savers = found
            point = RestorePoint(newest, is_inherited, savers)
            return GangRestore(listed.attempt, point, _describe(point))
    held = [*_held(listed.own), *_held(listed.inherited)]
    words = f"all ranks start from scratch, as some had not saved yet ({'; '.join(held)})"
    return GangRestore(listed.attempt, RestorePoint(), words if held else None)


def record_listing(snapshot: JobSnapshot, listed: CheckpointsListed, now: float) -> JobSnapshot:
    """Decide from where the gang resumes, or when to list again."""
    if listed.attempt != snapshot.next_attempt or not snapshot.is_listing:
        return snapshot
    for agent in snapshot.agents.values():
        listing = agent.listing.move(RequestState.ANSWERED)
        snapshot = snapshot.with_agent(replace(agent, listing=listing))
    if listed.problem is not None:
        again = now + LIST_AGAIN_SECONDS
        for rank in snapshot.ranks:
            delayed = replace(rank.budget, start_at=max(rank.budget.start_at, again))
            snapshot = snapshot.with_rank(replace(rank, budget=delayed))
        return snapshot
    try:
        return replace(snapshot, restore=choose(snapshot, listed))
    except NoCommonCheckpoint as none:
        message = (
            f"no intact checkpoint exists on all ranks ({none}). Restore a copy of the missing one "
            "and submit with resume_from, or use a new id. If the ranks train separate models, use "
            "--restart-scope rank"
        )
    failure = JobFailure(reason=Reason.INVALID_CHECKPOINT, message=message)
    return snapshot.fail(failure, now)


def record_damage(snapshot: JobSnapshot, rank: RankSnapshot, failed: RestoreFailed) -> JobSnapshot:
    """A rank could not read the chosen checkpoint: the next attempt resumes from another one."""
    warned = replace(rank.attempt, warning=excerpt(failed.message))
    noted = snapshot.with_attempt(rank, warned)
    point = snapshot.restore.point
    if point is None or failed.restore_from != str(point):
        return noted
    return replace(noted, unusable=snapshot.unusable | {point})


def _missing(snapshot: JobSnapshot, ranks: Sequence[RankCheckpoints]) -> list[int]:
    """Return the ranks that have saved and whose place is empty: it is away, or was removed."""
    pairs = zip(snapshot.ranks, ranks, strict=False)
    empty = (rank for rank, held in pairs if not (held.intact or held.damaged))
    return [rank.rank for rank in empty if rank.checkpoints_before + rank.attempt.checkpoints_saved]


def _newest_in_common(
    ranks: Sequence[RankCheckpoints],
    damaged: Collection[CheckpointName | None],
    lead: int,
    known: Collection[int],
    missing: Collection[int],
) -> tuple[CheckpointName, tuple[int, ...]] | None:
    """Return the newest checkpoint of all ranks that save, and these unless all do.

    None if a rank without checkpoints may have been killed before its first save, as no attempt of
    another one has saved more than `lead`. `known` are the only ranks that saved before.
    """
    names = [[*map(CheckpointName.parse, (*rank.intact, *rank.damaged))] for rank in ranks]
    savers = tuple(number for number, held in enumerate(names) if held)
    attempts = (Counter(name.generation for name in held if name) for held in names)
    most = max((max(counted.values()) for counted in attempts if counted), default=0)
    if missing:
        raise NoCommonCheckpoint("; ".join(_held(ranks, damaged, missing)))
    if not savers or (len(savers) < len(ranks) and most <= lead and savers != known):
        return None
    common = set.intersection(*({*_parsed(ranks[saver])} for saver in savers)).difference(damaged)
    if not common:
        raise NoCommonCheckpoint("; ".join(_held(ranks, damaged)))
    return max(common), savers if len(savers) < len(ranks) else ()


def _describe(point: RestorePoint) -> str:
    assert point.name is not None  # noqa: S101  it was found
    where = f"step {point.name.step} of attempt {point.name.generation}"
    if not point.savers:
        return f"all ranks resume from {where}, the newest checkpoint that all of them have"
    ranks = ", ".join(map(str, point.savers))
    who = f"rank {ranks} has" if len(point.savers) == 1 else f"ranks {ranks} have"
    return (
        f"only {who} checkpoints, and resumes from {where}; run.restore() returns None on the "
        "others"
    )


def _held(
    ranks: Sequence[RankCheckpoints],
    damaged: Collection[CheckpointName | None] = (),
    missing: Collection[int] = (),
) -> Iterator[str]:
    """Yield what each rank has, newest first, if any has something."""
    if not missing and not any(rank.intact or rank.damaged for rank in ranks):
        return
    for number, rank in enumerate(ranks):
        steps = [
            f"step {one.step} of attempt {one.generation}{' (damaged)' if one in damaged else ''}"
            for one in _parsed(rank)
        ]
        steps += [f"{text} (damaged)" for text in rank.damaged]
        if older := len(steps[NAMED_LIMIT:]):
            steps[NAMED_LIMIT:] = [f"and {older} older ones"]
        none = "none, though it has saved" if number in missing else "none"
        yield f"rank {number}: {', '.join(steps) or none}"


def _parsed(rank: RankCheckpoints) -> Iterator[CheckpointName]:
    return (name for text in rank.intact if (name := CheckpointName.parse(text)))
