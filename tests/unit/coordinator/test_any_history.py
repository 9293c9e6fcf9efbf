"""No history whatever leads a job astray: random happenings at random times, and what must hold."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stories import Story

from coordinator.actions import Start
from coordinator.plan import plan, wake_at
from coordinator.snapshot import AgentState, JobSnapshot
from muster.contracts.job import TERMINAL, JobStatus, Reason, StopRequest
from muster.contracts.messages import Executing, Hello, Warned

RANKS: Final = 3
MAX_RESTARTS: Final = 2

Deed = Callable[[Story, int], object]

OF_A_RANK: Final[dict[str, Deed]] = {
    "executes": lambda story, rank: story.rank_says(rank, Executing()),
    "says hello": lambda story, rank: story.rank_says(rank, Hello()),
    "is spawned": lambda story, rank: story.is_spawned(rank),
    "beats": lambda story, rank: story.beats(rank, story.rank(rank).step + 1),
    "beats in place": lambda story, rank: story.beats(rank, story.rank(rank).step),
    "was told to go": lambda story, rank: story.beats(rank, stopping=True),
    "warns": lambda story, rank: story.rank_says(rank, Warned(message="careful")),
    "exits well": lambda story, rank: story.exits(rank),
    "exits badly": lambda story, rank: story.exits(rank, code=1),
    "dies": lambda story, rank: story.dies(rank),
    "speaks from the past": lambda story, rank: story.rank_says(
        rank, Hello(), story.rank(rank).incarnation - 1
    ),
    "refuses": lambda story, rank: story.refuses(rank, Reason.INVALID_PROGRAM, "no"),
}

OF_THE_JOB: Final[dict[str, Callable[[Story], object]]] = {
    "agent joins": lambda story: _if_started(story, story.agent_joins),
    "agent drops": lambda story: _if_connected(story, story.agent_drops),
    "agent is lost": lambda story: story.agent_is_lost(),
    "agent of the past is lost": lambda story: story.agent_is_lost(story.job.generation - 1),
    "is interrupted": lambda story: _if_admitted(story, story.is_interrupted),
    "is stopped": lambda story: story.is_stopped(),
    "is stopped by force": lambda story: story.is_stopped(StopRequest.FORCED),
    "is condemned": lambda story: _if_admitted(story, story.is_condemned),
    "is let in": lambda story: story.job.status is JobStatus.QUEUED and story.is_admitted(),
}

MOMENTS: Final = [0.0, 0.0, 0.1, 1.0, 4.9, 5.0, 10.0, 31.0, 61.0, 121.0]

# Endings are rare, or every history would be a short one.
ENDINGS: Final = {
    "refuses",
    "is stopped",
    "is stopped by force",
    "is condemned",
    "is interrupted",
}


@dataclass(frozen=True)
class Event:
    """One thing that happens, and how long after the one before; or only time that passes."""

    seconds: float
    deed: str
    rank: int
    plans_first: bool


def _if_started(story: Story, deed: Callable[[], object]) -> None:
    if story.job.agent is not AgentState.ABSENT:
        deed()


def _if_connected(story: Story, deed: Callable[[], object]) -> None:
    if story.job.agent is AgentState.CONNECTED:
        deed()


def _if_admitted(story: Story, deed: Callable[[], object]) -> None:
    if story.job.status is not JobStatus.QUEUED:
        deed()


def events() -> st.SearchStrategy[Event]:
    often = sorted((OF_A_RANK.keys() | OF_THE_JOB.keys()) - ENDINGS)
    return st.builds(
        Event,
        seconds=st.sampled_from(MOMENTS),
        deed=st.sampled_from([*often * 3, *sorted(ENDINGS)]),
        rank=st.integers(0, RANKS - 1),
        plans_first=st.booleans(),
    )


@settings(
    derandomize=True,
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.sampled_from([Story.submitted, Story.starting, Story.running]),
    st.lists(events(), max_size=40),
    st.sampled_from([None, 20.0]),
)
def test_no_history_leads_a_job_astray(
    begin: Callable[..., Story], history: list[Event], progress: float | None
) -> None:
    story = begin(world_size=RANKS, max_restarts=MAX_RESTARTS, progress_timeout_seconds=progress)
    for event in history:
        story.passes(event.seconds)
        if event.plans_first:
            plans_soundly(story)
        happens(story, event)
        plans_soundly(story)


def happens(story: Story, event: Event) -> None:
    before = story.job
    if event.deed in OF_A_RANK:
        OF_A_RANK[event.deed](story, event.rank)
    else:
        OF_THE_JOB[event.deed](story)
    if before.status in TERMINAL:
        assert story.job.status is before.status, "what is over stays over"
    compare(before, story.job)


def plans_soundly(story: Story) -> None:
    """Carry out one plan after another, and look at each of them and at what it leads to."""
    for _ in range(10):
        actions = plan(story.job, story.now)
        if not actions:
            break
        before = story.job
        assert before.status not in TERMINAL
        targets = [action for action in actions if isinstance(action, Start)]
        for start in targets:
            rank = before.ranks[start.rank]
            assert not rank.is_alive
            assert not rank.finished
            assert not before.is_ending
            assert before.agent is AgentState.CONNECTED
        assert len(actions) == len({repr(action) for action in actions}), "everything once"
        story.takes(*actions)
        compare(before, story.job)
    else:
        raise AssertionError(f"the plan does not come to rest: {actions}")
    check(story.job)
    looks_ahead(story)


def looks_ahead(story: Story) -> None:
    """Until it wakes, the plan has nothing to do, so that nobody need ask."""
    moment = wake_at(story.job, story.now)
    assert moment > story.now
    if story.job.status is not JobStatus.QUEUED:
        halfway = min(moment, story.now + 1e6) / 2 + story.now / 2
        assert plan(story.job, halfway) == []


def check(job: JobSnapshot) -> None:
    for rank in job.ranks:
        assert rank.restarts <= MAX_RESTARTS
        assert not (rank.finished and rank.is_alive)
    if job.status in TERMINAL | {JobStatus.QUEUED}:
        assert not job.any_alive
        assert job.agent is AgentState.ABSENT
    if job.status is JobStatus.COMPLETED:
        assert job.all_finished
    if job.status is JobStatus.RUNNING and job.verdict is None:
        assert all(rank.is_well for rank in job.ranks)


def compare(before: JobSnapshot, after: JobSnapshot) -> None:
    assert after.generation >= before.generation
    for old, new in zip(before.ranks, after.ranks, strict=True):
        assert new.incarnation - old.incarnation in {0, 1}, "they go up, one by one"
        assert new.restarts - old.restarts in {0, 1}
        assert new.finished >= old.finished, "what is done stays done"
        if new.incarnation > old.incarnation:
            assert not old.is_alive, "one living process per rank"
