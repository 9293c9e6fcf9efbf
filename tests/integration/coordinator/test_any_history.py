"""Random observations at random times: what must hold for every history of a job."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.decide.actions import PublishGroup, Start
from coordinator.decide.plan import plan, wake_at
from coordinator.decide.state.job import JobSnapshot
from coordinator.decide.state.job_end import EndKind
from coordinator.decide.state.rank import RankSnapshot
from muster.contracts.agent import LOCAL_HOST, AgentState
from muster.contracts.job.retry import DO_NOT_RETRY_CODE, RETRIES
from muster.contracts.job.status import TERMINAL, JobStatus, Reason, StopRequest
from muster.contracts.messages.rank import Executing, Hello, Warned
from muster.contracts.pool import LIVING, TRANSITIONS, WorkerState
from tests.support.stories import Story

RANKS: Final = 3
BUDGETS: Final = {
    "max_restarts": 2,
    "max_hangs": 1,
    "max_out_of_memory": 1,
    "max_preemptions": 2,
    "max_fruitless": 2,
}
MAX_WORKERS: Final = 4

Step = Callable[[Story, int], object]

OF_A_RANK: Final[dict[str, Step]] = {
    "executes": lambda story, rank: story.rank_says(rank, Executing()),
    "says hello": lambda story, rank: story.rank_says(rank, Hello()),
    "is spawned": lambda story, rank: story.is_spawned(rank),
    "beats": lambda story, rank: story.beats(rank, story.rank(rank).progress.step + 1),
    "beats without a step": lambda story, rank: story.beats(rank, story.rank(rank).progress.step),
    "was asked to stop": lambda story, rank: story.beats(rank, stopping=True),
    "is stopped (SIGSTOP)": lambda story, rank: story.stopped.add(rank),
    "is continued": lambda story, rank: story.stopped.discard(rank),
    "warns": lambda story, rank: story.rank_says(rank, Warned(message="careful")),
    "exits well": lambda story, rank: story.exits(rank),
    "exits badly": lambda story, rank: story.exits(rank, code=1),
    "dies": lambda story, rank: story.dies(rank),
    "loses its process": lambda story, rank: story.loses_process(rank),
    "is terminated": lambda story, rank: story.is_ended(rank, signal=15),
    "lacks memory": lambda story, rank: story.is_ended(rank, signal=9, out_of_memory=True),
    "forbids a retry": lambda story, rank: story.exits(rank, code=DO_NOT_RETRY_CODE),
    "fails in a step": lambda story, rank: story.fails_in_step(
        rank, story.rank(rank).progress.step
    ),
    "saves": lambda story, rank: story.beats(
        rank, story.rank(rank).progress.step, last_checkpoint_step=story.rank(rank).progress.step
    ),
    "speaks as an earlier attempt": lambda story, rank: story.rank_says(
        rank, Hello(), story.rank(rank).attempt.number - 1
    ),
    "refuses": lambda story, rank: story.refuses(rank, Reason.INVALID_PROGRAM, "no"),
}

OF_THE_JOB: Final[dict[str, Callable[[Story], object]]] = {
    "agent joins": lambda story: _if_started(story, story.agent_connects),
    "agent drops": lambda story: _if_connected(story, story.agent_disconnects),
    "agent freezes": lambda story: story.agent_freezes(),
    "agent thaws": lambda story: story.agent_thaws(),
    "agent is lost": lambda story: story.agent_is_lost(),
    "agent of the past is lost": lambda story: story.agent_is_lost(story.agent.agent_number - 1),
    "is interrupted": lambda story: _if_admitted(story, story.is_interrupted),
    "is stopped": lambda story: story.is_stopped(),
    "is stopped by force": lambda story: story.is_stopped(StopRequest.FORCED),
    "fails without data": lambda story: _if_admitted(story, story.fails_without_data),
    "is admitted": lambda story: story.job.status is JobStatus.QUEUED and story.is_admitted(),
}

OF_A_POOLED_RANK: Final[dict[str, Step]] = {
    "is ready": lambda story, rank: story.is_ready(rank),
    "joins the group": lambda story, rank: story.joins_group(rank),
    "joins an earlier round": lambda story, rank: story.joins_group(
        rank, round_number=max(0, story.job.group.round - 1)
    ),
    "loses a peer": lambda story, rank: story.loses_peer(rank),
    "reports a mismatch": lambda story, rank: story.reports_mismatch(rank, rank + 1),
    "takes the last step": lambda story, rank: story.beats(rank, 100),
    "leaves the loop": lambda story, rank: (
        story.rank(rank).has_joined and story.beats(rank, 100).leaves_loop(rank, exporter=rank)
    ),
    "is asked to leave": lambda story, rank: story.is_asked_to_leave(rank),
    "saves for all": lambda story, rank: story.saves(rank, story.rank(rank).progress.step),
    "the last worker is asked to leave": lambda story, _: story.is_asked_to_leave(
        len(story.job.pool.members) - 1
    ),
}

OF_A_POOL: Final[dict[str, Callable[[Story], object]]] = {
    **{
        f"is scaled to {world_size}": lambda story, to=world_size: story.is_scaled(to)
        for world_size in range(1, MAX_WORKERS + 1)
    },
    "is paused": lambda story: story.is_paused(),
    "is asked to save": lambda story: story.is_asked_to_save(),
    "is resumed": lambda story: story.is_resumed(),
    "settles": lambda story: story.job.status is not JobStatus.QUEUED and story.settles(),
}

STEPS_OF_A_RANK: Final = OF_A_RANK | OF_A_POOLED_RANK
STEPS_OF_THE_JOB: Final = OF_THE_JOB | OF_A_POOL

PROGRESS_TIMEOUTS: Final = st.sampled_from([None, 20.0])
MOMENTS: Final = [0.0, 0.0, 0.1, 1.0, 4.9, 5.0, 10.0, 31.0, 61.0, 121.0]

MANY_HISTORIES: Final = settings(
    derandomize=True,
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow],
)

# Endings are rare, otherwise every history would be short.
ENDINGS: Final = {
    "refuses",
    "forbids a retry",
    "is stopped",
    "is stopped by force",
    "fails without data",
    "is interrupted",
}


@dataclass(frozen=True)
class Event:
    """One step of a history, and the time since the one before."""

    seconds: float
    step: str
    rank: int
    plans_first: bool


def _if_started(story: Story, step: Callable[[], object]) -> None:
    if story.agent.state is not AgentState.ABSENT:
        step()


def _if_connected(story: Story, step: Callable[[], object]) -> None:
    if story.agent.is_connected:
        step()


def _if_admitted(story: Story, step: Callable[[], object]) -> None:
    if story.job.status is not JobStatus.QUEUED:
        step()


def histories(steps: Collection[str], ranks: int) -> st.SearchStrategy[list[Event]]:
    often = sorted(set(steps) - ENDINGS)
    event = st.builds(
        Event,
        seconds=st.sampled_from(MOMENTS),
        step=st.sampled_from([*often * 3, *sorted(ENDINGS)]),
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
def test_any_history_keeps_a_job_sound(
    begin: Callable[..., Story], history: list[Event], progress: float | None
) -> None:
    play(
        begin(world_size=RANKS, **BUDGETS, progress_timeout_seconds=progress),
        history,
    )


@MANY_HISTORIES
@given(
    st.sampled_from([Story.submitted, Story.starting, Story.training, Story.exporting]),
    histories(STEPS_OF_A_RANK.keys() | STEPS_OF_THE_JOB.keys(), MAX_WORKERS),
    PROGRESS_TIMEOUTS,
    st.integers(1, RANKS),
)
def test_any_history_keeps_a_pool_sound(
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
    play(story, history)


@MANY_HISTORIES
@given(
    st.sampled_from([Story.submitted, Story.starting, Story.running]),
    histories(OF_A_RANK.keys() | OF_THE_JOB.keys(), RANKS),
)
def test_any_history_keeps_a_gang_sound(begin: Callable[..., Story], history: list[Event]) -> None:
    gang = {"command": ("true",), "restart_scope": "gang"}
    play(begin(world_size=RANKS, **BUDGETS, **gang), history)


def play(story: Story, history: list[Event]) -> None:
    for event in history:
        story.passes(event.seconds)
        if event.plans_first:
            plan_and_check(story)
        apply(story, event)
        plan_and_check(story)


def apply(story: Story, event: Event) -> None:
    before = story.job
    if event.step not in STEPS_OF_A_RANK:
        STEPS_OF_THE_JOB[event.step](story)
    elif event.rank < len(before.ranks):
        STEPS_OF_A_RANK[event.step](story, event.rank)
    if before.status in TERMINAL:
        assert story.job.status is before.status, "a terminal status never changes"
    if event.step != "settles":
        compare(before, story.job)


def plan_and_check(story: Story) -> None:
    """Take planned actions until nothing is due, and check every plan and its result."""
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
            assert before.is_needed(rank), "after the loop only the rank that exports is started"
            assert before.agents[LOCAL_HOST].is_connected
        if before.is_gang and targets:
            assert [start.rank for start in targets] == list(range(RANKS)), "all ranks or none"
            assert not before.all_finished
        for action in actions:
            if isinstance(action, PublishGroup):
                check_group(before, action)
        assert len(actions) == len({repr(action) for action in actions}), "no action twice"
        story.takes(*actions)
        compare(before, story.job)
    else:
        raise AssertionError(f"the plan does not come to rest: {actions}")
    check(story.job)
    check_wake_at(story)


def check_wake_at(story: Story) -> None:
    """Before `wake_at` the plan must be empty."""
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
        assert job.agents[LOCAL_HOST].state is AgentState.ABSENT
    if job.status is JobStatus.COMPLETED:
        assert job.all_finished
    if job.status is JobStatus.RUNNING and job.failure is None and not job.is_done:
        needed = [rank for rank in job.ranks if job.is_needed(rank)]
        assert not any(rank.trouble for rank in needed if rank.in_service)
        # A newcomer to a pool does not change the status.
        assert all(rank.is_well for rank in needed if is_working(job, rank))
    if job.is_synchronous:
        check_pool(job)
    if job.is_gang:
        numbers = {rank.attempt.number for rank in job.ranks}
        assert len(numbers) == 1, "all ranks are of the same attempt"


def check_budgets(job: JobSnapshot, rank: RankSnapshot) -> None:
    """No budget is exceeded in a running job, and only by one end in a failed one."""
    for kind, retry in RETRIES.items():
        limit = getattr(job.spec, retry.budget)
        assert rank.budget.endings.get(kind, 0) <= limit + (job.failure is not None)
    assert rank.budget.fruitless <= job.spec.max_fruitless
    assert rank.budget.restarts <= sum(rank.budget.endings.get(kind, 0) for kind in RETRIES)


def is_working(job: JobSnapshot, rank: RankSnapshot) -> bool:
    return not job.is_synchronous or job.pool.is_active(rank.attempt.worker_id)


def check_pool(job: JobSnapshot) -> None:
    living = {one.worker_id: one.rank for one in job.pool.members if one.state in LIVING}
    assert living == {rank.attempt.worker_id: rank.rank for rank in job.ranks if rank.is_alive}
    assert job.pool.room >= 0
    assert len(job.in_service) <= MAX_WORKERS
    if job.is_past_loop and job.is_done:
        assert job.ranks[job.end.exporter].finished, "the job is not done before the export"
    if job.is_done:
        assert job.step >= 100, "the job is not done before the last step"


def check_group(job: JobSnapshot, announced: PublishGroup) -> None:
    group = announced.group
    assert group.round == job.group.round + 1
    assert list(group.workers) == sorted(set(group.workers))
    assert len(group.workers) >= (job.spec.min_workers if job.end.kind is EndKind.NONE else 1)
    for worker, number, attempt in zip(group.workers, group.ranks, group.attempts, strict=True):
        rank = job.ranks[number]
        assert (rank.attempt.worker_id, rank.attempt.number) == (worker, attempt)
        assert rank.is_alive
        assert rank.attempt.member.ready
        assert rank.in_service
        assert not rank.attempt.member.is_past_loop
        assert job.pool.members[worker].state in {WorkerState.SYNCING, WorkerState.ACTIVE}


def compare(before: JobSnapshot, after: JobSnapshot) -> None:
    assert after.agents[LOCAL_HOST].agent_number >= before.agents[LOCAL_HOST].agent_number
    assert after.group.round - before.group.round in {0, 1}
    assert len(after.ranks) >= len(before.ranks), "ranks are never removed"
    for old, new in zip(before.pool.members, after.pool.members, strict=False):
        assert new.worker_id == old.worker_id
        assert new.rank == old.rank
        assert new.state in reachable(old.state)
    for old, new in zip(before.ranks, after.ranks, strict=False):
        assert new.attempt.number - old.attempt.number in {0, 1}, "attempts rise one by one"
        assert new.budget.restarts - old.budget.restarts in {0, 1}
        is_restarted = after.is_gang and new.attempt.number > old.attempt.number
        assert new.finished >= old.finished or is_restarted, "a finished rank stays finished"
        if new.attempt.number > old.attempt.number:
            assert not old.is_alive, "one living process per rank"


def reachable(state: WorkerState) -> set[WorkerState]:
    return {state}.union(*(reachable(after) for after in TRANSITIONS[state]))
