"""The rows are enough: a new coordinator that knows only them continues every job."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from coordinator.decide.actions import LoseHost, PlaceRank
from coordinator.decide.liveness import FORMER_HOST_SECONDS, HOST_LEASE_SECONDS
from coordinator.decide.placement import place
from coordinator.decide.state.job import JobSnapshot
from coordinator.decide.state.rank import NEVER
from coordinator.persistence import Moment, Urgency, rank_urgency
from coordinator.restore import snapshot_of
from muster.cluster.description import cluster_of_service
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.retry import RetryClass
from muster.contracts.job.status import TERMINAL, JobStatus, Reason, StopRequest
from muster.contracts.rank import COUNT_MAX, ProcessRecord, ProcessState
from tests.support.stories import Story, beat, queued_job, starts
from tests.support.successors import NOON, rows_of, successor

# Conditions of a rank that a coordinator may leave behind

CONDITIONS: dict[str, Callable[[Story], object]] = {
    "spawned": lambda story: story.is_spawned(0),
    "alive": lambda story: story.says_hello(0),
    "suspect": lambda story: story.says_hello(0).passes(6).plans(),
    "finished": lambda story: story.says_hello(0).exits(0),
    "failed": lambda story: story.says_hello(0).exits(0, code=1),
    "killed": lambda story: story.says_hello(0).dies(0),
    "preempted": lambda story: story.says_hello(0).beats(0, stopping=True).exits(0),
    "lost": lambda story: story.agent_is_lost(),
}


def with_status(job: JobSnapshot, status: JobStatus) -> JobSnapshot:
    reasons = {
        JobStatus.STARTING: None,
        JobStatus.RUNNING: None,
        JobStatus.STOPPING: Reason.INTERRUPTED,
    }
    reason = reasons.get(status, Reason.WORKER_EXITED)
    return replace(job, status=status, reason=reason, message=None)


@pytest.mark.parametrize("stop", [None, *StopRequest])
@pytest.mark.parametrize("status", list(JobStatus))
@pytest.mark.parametrize("condition", list(CONDITIONS))
@pytest.mark.parametrize("sibling", ["alive", "never started"])
def test_a_takeover_continues_from_every_condition(
    condition: str, sibling: str, status: JobStatus, stop: StopRequest | None
) -> None:
    if sibling == "alive":
        left = Story.starting(world_size=2).says_hello(1)
    else:
        left = Story.starting(world_size=1)
    CONDITIONS[condition](left)
    if left.job.all_finished and status in {JobStatus.QUEUED, JobStatus.PAUSED}:
        return  # it is COMPLETED before that
    left.job = with_status(left.job, status)
    story = successor(left, stop=stop)
    assert not story.job.any_alive, "its processes were ended before"
    story.plans()
    if status in TERMINAL:
        assert story.job.status is status
    elif stop is not None and not story.job.all_finished:
        assert story.job.status is JobStatus.STOPPED
    elif story.job.status is not JobStatus.COMPLETED:
        run_to_the_end(story)


def run_to_the_end(story: Story) -> None:
    if story.job.status is JobStatus.QUEUED:
        story.is_admitted().plans()
    down = [rank.rank for rank in story.job.ranks if rank.is_down]
    assert starts(story.agent_connects().plans()) == down
    story.says_hello(*down).plans()
    assert story.job.status is JobStatus.RUNNING
    for rank in down:
        story.exits(rank)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED


def test_counters_and_positions_survive_a_takeover() -> None:
    story = Story.running(world_size=2)
    story.beats(0, step=7, checkpoints_saved=1, last_checkpoint_step=5, metrics={"a": 1.0})
    story.dies(0).plans()
    story.wakes()
    story.says_hello(0).beats(0, step=9, shard_idx=3, checkpoints_saved=2, last_checkpoint_step=9)
    before = story.rank(0)
    after = successor(story).rank(0)
    assert (after.attempt.number, after.budget.restarts) == (1, 1)
    assert after.budget.endings[RetryClass.KILLED] == 1
    assert after.progress == before.progress
    assert after.checkpoints_before + after.attempt.checkpoints_saved == 3


def test_the_sum_of_checkpoints_fits_into_the_database() -> None:
    story = Story.running(world_size=1)
    story.beats(0, checkpoints_saved=COUNT_MAX).dies(0).plans()
    story.wakes()
    story.says_hello(0).beats(0, checkpoints_saved=COUNT_MAX)
    (row,) = rows_of(story.job).ranks
    assert row.checkpoints_saved == COUNT_MAX


def taken_over(story: Story) -> Story:
    """Return the story under the next coordinator, which finds the agent alive."""
    return successor(story, agents=[LOCAL_HOST])


@pytest.mark.parametrize("condition", list(CONDITIONS))
def test_a_takeover_with_an_agent_starts_only_ended_ranks(
    condition: str,
) -> None:
    left = Story.starting(world_size=2).says_hello(1)
    CONDITIONS[condition](left)
    story = taken_over(left)
    assert [rank.is_alive for rank in story.job.ranks] == [r.is_alive for r in left.job.ranks]
    assert starts(story.plans()) == [], "the agent has not connected yet"
    alive = [rank.rank for rank in left.job.ranks if rank.is_alive]
    down = [rank.rank for rank in left.job.ranks if rank.is_down]
    assert starts(story.agent_connects().plans()) == down
    story.says_hello(*alive, *down).plans()
    assert story.job.status is JobStatus.RUNNING
    numbers = [[it.rank(r).attempt.number for r in alive] for it in (left, story)]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("tell", [Story.submitted, Story.starting, Story.running])
def test_the_note_of_a_job_survives_a_takeover(tell: Callable[..., Story]) -> None:
    left = tell(world_size=1)
    left.job = replace(
        left.job, note="a small data set was made", message="a small data set was made"
    )
    story = successor(left)
    story.plans()
    run_to_the_end_of_starting(story)
    assert story.job.status is JobStatus.RUNNING
    assert story.job.message == "a small data set was made"


def run_to_the_end_of_starting(story: Story) -> None:
    if story.job.status is JobStatus.QUEUED:
        story.is_admitted().plans()
    story.agent_connects().plans()
    story.says_hello(0).plans()


# Rows


def test_a_rank_without_an_attempt_has_no_row() -> None:
    assert rows_of(Story.submitted(world_size=2).job).ranks == []


def test_a_row_holds_process_and_heartbeat() -> None:
    story = Story.running(world_size=1).passes(3)
    rows = rows_of(story.job, story.now)
    assert rows.job.status is JobStatus.RUNNING
    (worker,) = rows.ranks
    assert worker.process == ProcessRecord(
        pid=4711, start_ticks=99, boot_id="boot", node="node", pid_namespace=1
    )
    assert worker.last_heartbeat_at == NOON - timedelta(seconds=3)
    story.dies(0)
    (worker,) = rows_of(story.job, story.now).ranks
    assert worker.process is None
    assert worker.exit_signal == 9


def test_a_program_without_heartbeats_has_no_heartbeat_time() -> None:
    (worker,) = rows_of(Story.starting(world_size=1).job).ranks
    assert worker.last_heartbeat_at is None


@pytest.mark.parametrize(
    ("ends", "status", "code"),
    [
        (lambda story: story.exits(0), JobStatus.COMPLETED, 0),
        (lambda story: story.is_stopped().dies(0), JobStatus.STOPPED, None),
        (lambda story: story.exits(0, code=3), JobStatus.FAILED, 3),
        (lambda story: story.dies(0, signal=11), JobStatus.FAILED, 139),
        (
            lambda story: story.refuses(0, Reason.INVALID_DATASET, "none").exits(0, code=1),
            JobStatus.FAILED,
            1,
        ),
    ],
)
def test_a_finished_job_has_a_time_and_an_exit_code(
    ends: Callable[[Story], Story], status: JobStatus, code: int | None
) -> None:
    story = Story.running(world_size=1, max_restarts=0)
    row = rows_of(story.job).job
    assert (row.exit_code, row.finished_at) == (None, None)
    ends(story).plans()
    row = rows_of(story.job).job
    assert (row.status, row.exit_code, row.finished_at) == (status, code, NOON)


def test_a_moment_converts_earlier_times() -> None:
    moment = Moment(monotonic=50.0, wall=NOON)
    assert moment.wall_of(NEVER) is None
    assert moment.wall_of(50.0) == NOON
    assert moment.wall_of(20.0) == NOON - timedelta(seconds=30)


@pytest.mark.parametrize(
    ("new", "how"),
    [
        ({}, Urgency.NONE),
        ({"last_heartbeat_at": NOON - timedelta(hours=1)}, Urgency.HEARTBEAT),
        ({"progress": beat(8, loss=0.1).progress}, Urgency.PROGRESS),
        ({"checkpoints_saved": 2, "last_heartbeat_at": NOON}, Urgency.PROGRESS),
        ({"state": ProcessState.EXITED}, Urgency.SOON),
        ({"process": None}, Urgency.SOON),
        ({"restarts": 1}, Urgency.NOW),
        ({"failures": 1}, Urgency.NOW),
        ({"finished": True}, Urgency.NOW),
    ],
)
def test_only_what_a_successor_needs_is_urgent(new: dict[str, object], how: Urgency) -> None:
    (worker,) = rows_of(Story.running(world_size=1).job).ranks
    assert rank_urgency(worker, replace(worker, **new)) is how


def test_a_new_row_or_attempt_is_urgent() -> None:
    (worker,) = rows_of(Story.running(world_size=1).job).ranks
    assert rank_urgency(None, worker) is Urgency.NOW
    assert rank_urgency(worker, replace(worker, attempt=1)) is Urgency.NOW


def test_a_successor_places_a_rank_where_a_host_asked_for_it() -> None:
    story = Story.training(world_size=2, max_workers=3, hosts=("a", "b", "c", "d"))
    story.is_joined_by("d")
    now = Moment(monotonic=5.0, wall=NOON)
    hosts = story.job.hosts
    job = snapshot_of(rows_of(story.job, 1.0), now, hosts=hosts, node="a", agents={"a", "b"})
    after = Story(job, now=5.0)
    after.plans()
    assert [rank.host for rank in after.job.ranks] == ["a", "b", "d"]


def test_a_successor_on_another_node_starts_nothing_twice() -> None:
    rows, node = rows_of(Story.training(world_size=2).job, 1.0), "n-0123456789ab"
    hosts, now = queued_job((node,)).hosts, Moment(monotonic=5.0, wall=NOON)
    # No launcher can tell that an agent of another host is gone.
    job = snapshot_of(rows, now, hosts=hosts, node=node, agents={LOCAL_HOST})
    assert not job.agents[LOCAL_HOST].is_local
    story = Story(job, now=5.0)
    assert story.plans() == []
    (lost, *_) = story.passes(HOST_LEASE_SECONDS).plans()
    assert isinstance(lost, LoseHost)
    cluster = cluster_of_service(None, node, slots=2)
    placed = [*place(story.job, [story.job], cluster, {}, story.now)]
    assert placed == [PlaceRank(rank=rank, host=node) for rank in range(2)]


def test_the_host_of_another_coordinator_is_given_up_soon() -> None:
    story = Story.training(world_size=4, hosts=("a", "b"))
    now, agents = Moment(monotonic=5.0, wall=NOON), {"a", "b"}
    hosts = {name: replace(host, is_local=name == "b") for name, host in story.job.hosts.items()}
    rows = rows_of(story.job, 1.0)
    lost: dict[str, bool] = {}
    for former in ("a", ""):
        job = snapshot_of(rows, now, hosts=hosts, node="b", agents=agents, former=former)
        after = Story(job, now=5.0)
        done = after.passes(FORMER_HOST_SECONDS).plans()
        lost[former] = any(isinstance(each, LoseHost) for each in done)
        assert job.group.round > rows.job.group_round + (999 if former else 0)
    assert lost == {"a": True, "": False}
