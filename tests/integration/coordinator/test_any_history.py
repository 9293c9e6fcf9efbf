"""No history whatever leads a job astray: random happenings at random times, and what must hold."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stories import Story

from coordinator.actions import Announce, Start
from coordinator.plan import plan, wake_at
from coordinator.snapshot import AgentState, JobSnapshot, RankSnapshot
from muster.contracts.endings import DO_NOT_RETRY_CODE, RETRIES
from muster.contracts.job import TERMINAL, JobStatus, Reason, StopRequest
from muster.contracts.messages import Executing, Hello, Warned
from muster.contracts.pool import LIVING, TRANSITIONS, WorkerState

RANKS: Final = 3
BUDGETS: Final = {
    "max_restarts": 2,
    "max_hangs": 1,
    "max_out_of_memory": 1,
    "max_preemptions": 2,
    "max_fruitless": 2,
}
MAX_WORKERS: Final = 4

Deed = Callable[[Story, int], object]

OF_A_RANK: Final[dict[str, Deed]] = {
    "executes": lambda story, rank: story.rank_says(rank, Executing()),
    "says hello": lambda story, rank: story.rank_says(rank, Hello()),
    "is spawned": lambda story, rank: story.is_spawned(rank),
    "beats": lambda story, rank: story.beats(rank, story.rank(rank).step + 1),
    "beats in place": lambda story, rank: story.beats(rank, story.rank(rank).step),
    "was told to go": lambda story, rank: story.beats(rank, stopping=True),
    "stands still": lambda story, rank: story.stopped.add(rank),
    "goes on": lambda story, rank: story.stopped.discard(rank),
    "warns": lambda story, rank: story.rank_says(rank, Warned(message="careful")),
    "exits well": lambda story, rank: story.exits(rank),
    "exits badly": lambda story, rank: story.exits(rank, code=1),
    "dies": lambda story, rank: story.dies(rank),
    "is terminated": lambda story, rank: story.is_ended(rank, signal=15),
    "lacks memory": lambda story, rank: story.is_ended(rank, signal=9, out_of_memory=True),
    "wants no other try": lambda story, rank: story.exits(rank, code=DO_NOT_RETRY_CODE),
    "fails in a step": lambda story, rank: story.fails_in_step(rank, story.rank(rank).step),
    "saves": lambda story, rank: story.beats(
        rank, story.rank(rank).step, last_checkpoint_step=story.rank(rank).step
    ),
    "speaks from the past": lambda story, rank: story.rank_says(
        rank, Hello(), story.rank(rank).incarnation - 1
    ),
    "refuses": lambda story, rank: story.refuses(rank, Reason.INVALID_PROGRAM, "no"),
}

OF_THE_JOB: Final[dict[str, Callable[[Story], object]]] = {
    "agent joins": lambda story: _if_started(story, story.agent_joins),
    "agent drops": lambda story: _if_connected(story, story.agent_drops),
    "agent freezes": lambda story: story.agent_freezes(),
    "agent thaws": lambda story: story.agent_thaws(),
    "agent is lost": lambda story: story.agent_is_lost(),
    "agent of the past is lost": lambda story: story.agent_is_lost(story.job.generation - 1),
    "is interrupted": lambda story: _if_admitted(story, story.is_interrupted),
    "is stopped": lambda story: story.is_stopped(),
    "is stopped by force": lambda story: story.is_stopped(StopRequest.FORCED),
    "is condemned": lambda story: _if_admitted(story, story.is_condemned),
    "is let in": lambda story: story.job.status is JobStatus.QUEUED and story.is_admitted(),
}

OF_A_POOLED_RANK: Final[dict[str, Deed]] = {
    "is ready": lambda story, rank: story.is_ready(rank),
    "takes up": lambda story, rank: story.takes_up(rank),
    "takes up what is past": lambda story, rank: story.takes_up(
        rank, generation=max(0, story.job.layout.generation - 1)
    ),
    "is stranded": lambda story, rank: story.is_stranded(rank),
    "disputes another": lambda story, rank: story.disputes(rank, rank + 1),
    "takes the last step": lambda story, rank: story.beats(rank, 100),
    "is to let go": lambda story, rank: story.is_to_let_go(rank),
    "is to let the last go": lambda story, _: story.is_to_let_go(len(story.job.pool.members) - 1),
}

OF_A_POOL: Final[dict[str, Callable[[Story], object]]] = {
    **{
        f"is scaled to {world_size}": lambda story, to=world_size: story.is_scaled(to)
        for world_size in range(1, MAX_WORKERS + 1)
    },
    "is paused": lambda story: story.is_paused(),
    "is resumed": lambda story: story.is_resumed(),
    "settles": lambda story: story.job.status is not JobStatus.QUEUED and story.settles(),
}

DEEDS_OF_A_RANK: Final = OF_A_RANK | OF_A_POOLED_RANK
DEEDS_OF_THE_JOB: Final = OF_THE_JOB | OF_A_POOL

PROGRESS_TIMEOUTS: Final = st.sampled_from([None, 20.0])
MOMENTS: Final = [0.0, 0.0, 0.1, 1.0, 4.9, 5.0, 10.0, 31.0, 61.0, 121.0]

MANY_HISTORIES: Final = settings(
    derandomize=True,
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

# Endings are rare, or every history would be a short one.
ENDINGS: Final = {
    "refuses",
    "wants no other try",
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


def histories(deeds: Collection[str], ranks: int) -> st.SearchStrategy[list[Event]]:
    often = sorted(set(deeds) - ENDINGS)
    event = st.builds(
        Event,
        seconds=st.sampled_from(MOMENTS),
        deed=st.sampled_from([*often * 3, *sorted(ENDINGS)]),
        rank=st.integers(0, ranks - 1),
        plans_first=st.booleans(),
    )
    return st.lists(event, max_size=40)


@MANY_HISTORIES
@given(
    st.sampled_from([Story.submitted, Story.starting, Story.running]),
    histories(OF_A_RANK.keys() | OF_THE_JOB.keys(), RANKS),
    PROGRESS_TIMEOUTS,
)
def test_no_history_leads_a_job_astray(
    begin: Callable[..., Story], history: list[Event], progress: float | None
) -> None:
    acts_out(
        begin(world_size=RANKS, **BUDGETS, progress_timeout_seconds=progress),
        history,
    )


@MANY_HISTORIES
@given(
    st.sampled_from([Story.submitted, Story.starting, Story.training]),
    histories(DEEDS_OF_A_RANK.keys() | DEEDS_OF_THE_JOB.keys(), MAX_WORKERS),
    PROGRESS_TIMEOUTS,
    st.integers(1, RANKS),
)
def test_no_history_leads_a_pool_astray(
    begin: Callable[..., Story], history: list[Event], progress: float | None, least: int
) -> None:
    story = begin(
        mode="synchronous",
        world_size=RANKS,
        min_workers=least,
        max_workers=MAX_WORKERS,
        **BUDGETS,
        progress_timeout_seconds=progress,
    )
    acts_out(story, history)


@MANY_HISTORIES
@given(
    st.sampled_from([Story.submitted, Story.starting, Story.running]),
    histories(OF_A_RANK.keys() | OF_THE_JOB.keys(), RANKS),
)
def test_no_history_leads_a_gang_astray(begin: Callable[..., Story], history: list[Event]) -> None:
    gang = {"command": ("true",), "restart_scope": "gang"}
    acts_out(begin(world_size=RANKS, **BUDGETS, **gang), history)


def acts_out(story: Story, history: list[Event]) -> None:
    for event in history:
        story.passes(event.seconds)
        if event.plans_first:
            plans_soundly(story)
        happens(story, event)
        plans_soundly(story)


def happens(story: Story, event: Event) -> None:
    before = story.job
    if event.deed not in DEEDS_OF_A_RANK:
        DEEDS_OF_THE_JOB[event.deed](story)
    elif event.rank < len(before.ranks):
        DEEDS_OF_A_RANK[event.deed](story, event.rank)
    if before.status in TERMINAL:
        assert story.job.status is before.status, "what is over stays over"
    if event.deed != "settles":
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
            assert not rank.finished or before.is_gang
            assert not before.is_ending
            assert before.agent is AgentState.CONNECTED
        if before.is_gang and targets:
            assert [start.rank for start in targets] == list(range(RANKS)), "all or none"
            assert not before.all_finished
        for action in actions:
            if isinstance(action, Announce):
                check_announcement(before, action)
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
        check_budgets(job, rank)
        assert not (rank.finished and rank.is_alive)
    if job.status in TERMINAL | {JobStatus.QUEUED}:
        assert not job.any_alive
        assert job.agent is AgentState.ABSENT
    if job.status is JobStatus.COMPLETED:
        assert job.all_finished
    if job.status is JobStatus.RUNNING and job.verdict is None and not job.done:
        assert not any(rank.trouble for rank in job.in_service)
        # A newcomer to a pool disturbs nobody.
        assert all(rank.is_well for rank in job.ranks if is_at_work(job, rank))
    if job.is_synchronous:
        check_pool(job)
    if job.is_gang:
        assert len({rank.incarnation for rank in job.ranks}) == 1, "they have met in one place"


def check_budgets(job: JobSnapshot, rank: RankSnapshot) -> None:
    """No class may be overdrawn in a job that goes on, and none by more than the end that tells."""
    for kind, retry in RETRIES.items():
        limit = getattr(job.spec, retry.budget)
        assert rank.endings.get(kind, 0) <= limit + (job.verdict is not None)
    assert rank.fruitless <= job.spec.max_fruitless
    assert rank.restarts <= sum(rank.endings.get(kind, 0) for kind in RETRIES)


def is_at_work(job: JobSnapshot, rank: RankSnapshot) -> bool:
    return not job.is_synchronous or job.pool.is_active(rank.worker_id)


def check_pool(job: JobSnapshot) -> None:
    living = {one.worker_id: one.rank for one in job.pool.members if one.state in LIVING}
    assert living == {rank.worker_id: rank.rank for rank in job.ranks if rank.is_alive}
    assert job.pool.room >= 0
    assert len(job.in_service) <= MAX_WORKERS
    if job.done:
        assert job.step >= 100, "nobody is done before the last step"


def check_announcement(job: JobSnapshot, announced: Announce) -> None:
    layout = announced.layout
    assert layout.generation == job.layout.generation + 1
    assert list(layout.workers) == sorted(set(layout.workers))
    assert len(layout.workers) >= job.spec.min_workers
    for worker, number, incarnation in zip(
        layout.workers, layout.ranks, layout.incarnations, strict=True
    ):
        rank = job.ranks[number]
        assert (rank.worker_id, rank.incarnation) == (worker, incarnation)
        assert rank.is_alive
        assert rank.ready
        assert rank.in_service
        assert job.pool.members[worker].state in {WorkerState.SYNCING, WorkerState.ACTIVE}


def compare(before: JobSnapshot, after: JobSnapshot) -> None:
    assert after.generation >= before.generation
    assert after.layout.generation - before.layout.generation in {0, 1}
    assert len(after.ranks) >= len(before.ranks), "a place is for ever"
    for old, new in zip(before.pool.members, after.pool.members, strict=False):
        assert new.worker_id == old.worker_id
        assert new.rank == old.rank
        assert new.state in reachable(old.state)
    for old, new in zip(before.ranks, after.ranks, strict=False):
        assert new.incarnation - old.incarnation in {0, 1}, "they go up, one by one"
        assert new.restarts - old.restarts in {0, 1}
        begins_anew = after.is_gang and new.incarnation > old.incarnation
        assert new.finished >= old.finished or begins_anew, "what is done stays done"
        if new.incarnation > old.incarnation:
            assert not old.is_alive, "one living process per rank"


def reachable(state: WorkerState) -> set[WorkerState]:
    return {state}.union(*(reachable(after) for after in TRANSITIONS[state]))
