from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from coordinator.decide.actions import (
    ActionTaken,
    AgentConnected,
    AgentLost,
    AgentNotStarted,
    AgentSaid,
    KillProcess,
    Observation,
    ReportSlowExit,
    SetStatus,
    Start,
    StopRequested,
    Suspect,
)
from coordinator.decide.events import OVERLOADED, NewEvent, event_of
from coordinator.decide.state.rank import Cause
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.status import JobStatus, Reason, StopRequest
from muster.contracts.messages.agent import AgentHeartbeat, RankSaid, RankSpawned
from muster.contracts.messages.rank import (
    Hello,
    JoinedGroup,
    LoopEnded,
    PeerLost,
    PermanentFailure,
    RankMessage,
    Ready,
    StateMismatch,
    Warned,
)
from tests.support.stories import Story, beat, exited
from tests.support.successors import successor

SILENT = Cause(reason=Reason.HEARTBEAT_TIMEOUT, message="sent no heartbeat for 10 s")


def event_after(story: Story, observation: Observation) -> NewEvent | None:
    before = story.job
    return event_of(before, observation, story.observes(observation).job)


def of_rank(kind: str, message: str) -> NewEvent:
    return NewEvent(kind=kind, message=message, rank=1, attempt=0)


WARNING = RankSaid(rank=1, attempt=0, message=Warned(message="took an older checkpoint"))


@pytest.mark.parametrize(
    ("observation", "entry"),
    [
        (exited(1, 0, code=3), of_rank("rank_exited", "rank 1 exited with code 3")),
        (exited(1, 0, code=0), of_rank("rank_exited", "rank 1 exited with code 0")),
        (
            exited(1, 0, signal=9),
            of_rank("rank_exited", "rank 1 was ended by signal 9 (SIGKILL)"),
        ),
        (
            exited(1, 0, unstarted="cannot be started in /: no process"),
            of_rank("rank_exited", "rank 1 cannot be started in /: no process"),
        ),
        (WARNING, of_rank("warned", "rank 1: took an older checkpoint")),
        (
            ActionTaken(action=KillProcess(rank=1, cause=SILENT)),
            of_rank("rank_killed", "rank 1 sent no heartbeat for 10 s"),
        ),
        (
            ActionTaken(action=Suspect(rank=1)),
            of_rank("rank_suspected", "rank 1 is late with its heartbeat"),
        ),
        (
            ActionTaken(
                action=ReportSlowExit(rank=1, limit_seconds=29.7, limit="stop_grace_seconds")
            ),
            of_rank(
                "slow_exit",
                "rank 1 is exiting for 10 s: an exit handler (atexit) of the program may wait for "
                "a slow service. It is killed after 30 s (stop_grace_seconds)",
            ),
        ),
        (
            ActionTaken(action=SetStatus(status=JobStatus.RECOVERING, message="rank 1 died")),
            NewEvent(kind="job_recovering", message="the job is RECOVERING: rank 1 died"),
        ),
        (
            ActionTaken(action=SetStatus(status=JobStatus.COMPLETED)),
            NewEvent(kind="job_completed", message="the job is COMPLETED"),
        ),
        (
            AgentLost(host=LOCAL_HOST, agent_number=1, message="the agent died"),
            NewEvent(kind="agent_lost", message="the agent died"),
        ),
    ],
)
def test_an_observation_becomes_its_event(observation: Observation, entry: NewEvent) -> None:
    story = Story.running(world_size=2)
    assert event_after(story, observation) == entry


def test_the_end_of_another_rank_after_the_loop_is_an_event() -> None:
    story = Story.training(world_size=2)
    ended = RankSaid(rank=1, attempt=0, message=LoopEnded(exporter=0))
    assert event_after(story, ended) == NewEvent(
        kind="loop_ended",
        message="training is over and saved; the job is complete once the script of rank 0 has "
        "ended with exit code 0",
    )
    assert event_after(story, ended) is None
    words = "exited with code 1 after the loop; it is not started again: rank 0 exports"
    assert event_after(story, exited(1, 0, code=1)) == of_rank("rank_exited", f"rank 1 {words}")


def test_a_wait_for_gpus_is_one_event() -> None:
    story = Story.starting(world_size=2, command=("true",))
    none = partial(exited, 1, unstarted="found 0 of 1 free GPUs", is_waiting=True)
    first = event_after(story, none(0))
    assert first is not None
    assert first.message == "rank 1 found 0 of 1 free GPUs"
    story.runs_for(1.0)
    assert event_after(story, none(1)) is None
    story.runs_for(2.0)
    assert event_after(story, exited(1, 2, unstarted="found 1 of 2 free GPUs", is_waiting=True))


def test_a_failing_job_has_two_events() -> None:
    story = Story.running(world_size=2, max_restarts=0).exits(1, code=3)
    why = "rank 1 exited with code 3 and may not be restarted"
    stopping = ActionTaken(action=SetStatus(status=JobStatus.STOPPING, message=why))
    words = "the job cannot go on; ranks that still run save and exit"
    assert event_after(story, stopping) == NewEvent(kind="job_failing", message=words)
    failed = ActionTaken(action=SetStatus(status=JobStatus.FAILED, message=why))
    assert event_after(story, failed) == NewEvent(
        kind="job_failed", message=f"the job is FAILED: {why}"
    )


def test_only_an_agent_with_ranks_is_adopted() -> None:
    story = Story.running(world_size=2).agent_is_lost(living=[1])
    story.plans()
    joined = AgentConnected(host=LOCAL_HOST, agent_number=story.agent.agent_number)
    adopted = NewEvent(
        kind="agent_adopted", message="the job's agent has connected, its ranks go on"
    )
    assert event_after(story, joined) == adopted
    story = Story.submitted().is_admitted()
    story.plans()
    assert (
        event_after(story, AgentConnected(host=LOCAL_HOST, agent_number=story.agent.agent_number))
        is None
    )


@pytest.mark.parametrize(
    "found", [{"living": [0, 1]}, {"agents": [LOCAL_HOST]}], ids=["alone", "agent"]
)
def test_a_takeover_is_an_event(
    found: dict[str, Any],
) -> None:
    story = successor(Story.running(world_size=2), **found)
    sentence = "a new coordinator has taken over; the job's agent has connected, its ranks go on"
    story.plans()
    joined = AgentConnected(host=LOCAL_HOST, agent_number=story.agent.agent_number)
    assert event_after(story, joined) == NewEvent(kind="agent_adopted", message=sentence)
    again = AgentConnected(
        host=LOCAL_HOST, agent_number=story.agent_disconnects().agent.agent_number
    )
    adopted = NewEvent(
        kind="agent_adopted", message="the job's agent has connected, its ranks go on"
    )
    assert event_after(story, again) == adopted


def test_a_step_of_a_group_that_a_new_coordinator_does_not_know_is_no_event() -> None:
    story = successor(Story.training(world_size=2), agents=[LOCAL_HOST])
    assert not story.job.group.ranks
    for rank in (0, 1):  # in a group that was announced, but not committed
        story.rank_says(rank, JoinedGroup(round=story.job.group.round, step=6))
        assert event_after(story, RankSaid(rank=rank, attempt=0, message=beat(step=7))) is None


@pytest.mark.parametrize("observation", [exited(1, 0, code=3), WARNING])
def test_a_repeated_message_is_one_event(observation: Observation) -> None:
    story = Story.running(world_size=2).observes(observation)
    assert event_after(story, observation) is None


def test_a_start_is_one_event() -> None:
    story = Story.starting(world_size=2)
    spawned = RankSpawned(
        rank=1, attempt=0, pid=77, start_ticks=1, boot_id="boot", node="node", pid_namespace=1
    )
    assert event_after(story, spawned) == of_rank("rank_started", "rank 1 runs as pid 77")
    assert event_after(story, spawned) is None


def test_the_first_step_of_each_group_is_an_event() -> None:
    story = Story.training(world_size=2)
    entry = NewEvent(kind="step_taken", message="ranks 0, 1 have taken step 7")
    assert event_after(story, RankSaid(rank=1, attempt=0, message=beat(step=7))) == entry
    assert event_after(story, RankSaid(rank=0, attempt=0, message=beat(step=7))) is None
    assert event_after(story, RankSaid(rank=1, attempt=0, message=beat(step=8))) is None
    story.dies(1).settles(8)
    entry = NewEvent(kind="step_taken", message="ranks 0, 1 have taken step 9")
    assert event_after(story, RankSaid(rank=0, attempt=0, message=beat(step=9))) == entry


@pytest.mark.parametrize(
    ("begin", "message"),
    [(Story.training, Ready(port=0)), (Story.running, Hello())],
    ids=["in a group", "alone"],
)
def test_a_replacement_that_can_train_is_an_event(
    begin: Callable[..., Story], message: RankMessage
) -> None:
    story = begin(world_size=2)
    story.dies(1).runs_for(1)
    said = RankSaid(rank=1, attempt=1, message=message)
    entry = NewEvent(kind="rank_ready", message="rank 1 is ready", rank=1, attempt=1)
    assert event_after(story, said) == entry
    assert event_after(story, said) is None


def test_an_overloaded_machine_is_one_event() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10)
    entries = [
        event_after(
            story, AgentSaid(host=LOCAL_HOST, message=AgentHeartbeat(stopped=(), starved=starved))
        )
        for starved in (((0, 0, 9.9),), ((0, 0, 10.0),), ((1, 0, 10.0),))
    ]
    assert entries == [None, NewEvent(kind="overloaded", message=f"the machine {OVERLOADED}"), None]


def test_a_note_is_not_repeated_as_a_reason() -> None:
    story = Story.running(world_size=2)
    story.job = replace(story.job, note="env shows HF_TOKEN")
    recovering = SetStatus(status=JobStatus.RECOVERING, message="rank 1 died")
    entry = NewEvent(kind="job_recovering", message="the job is RECOVERING: rank 1 died")
    assert event_after(story, ActionTaken(action=recovering)) == entry
    running = SetStatus(status=JobStatus.RUNNING, message="env shows HF_TOKEN")
    entry = NewEvent(kind="job_running", message="the job is RUNNING")
    assert event_after(story, ActionTaken(action=running)) == entry


def test_a_killed_rank_has_no_further_events() -> None:
    story = Story.starting(world_size=2).is_stopped(StopRequest.FORCED)
    story.plans()
    spawned = RankSpawned(
        rank=1, attempt=0, pid=77, start_ticks=1, boot_id="boot", node="node", pid_namespace=1
    )
    assert event_after(story, spawned) is None
    assert event_after(story, exited(1, 0, signal=9)) is None


def test_an_exit_before_the_kill_is_an_event() -> None:
    story = Story.running(world_size=2).is_stopped(StopRequest.FORCED)
    story.plans()
    entry = of_rank("rank_exited", "rank 1 exited with code 3")
    assert event_after(story, exited(1, 0, code=3)) == entry


@pytest.mark.parametrize(
    "observation",
    [
        RankSaid(rank=1, attempt=0, message=Hello()),
        RankSaid(rank=1, attempt=0, message=beat(step=1)),
        StopRequested(request=StopRequest.GRACEFUL, grace_seconds=1),
        ActionTaken(action=Start(rank=1)),
        ActionTaken(action=SetStatus(status=JobStatus.RUNNING, message="the same, said otherwise")),
        RankSaid(rank=1, attempt=7, message=Warned(message="of an unknown attempt")),
        RankSaid(rank=7, attempt=0, message=Warned(message="of an unknown rank")),
        AgentLost(host=LOCAL_HOST, agent_number=7, message="another agent died"),
    ],
)
def test_routine_observations_are_no_events(observation: Observation) -> None:
    assert event_after(Story.running(world_size=2), observation) is None


def test_the_next_attempt_may_repeat_a_warning() -> None:
    story = Story.running(world_size=2).observes(WARNING).dies(1)
    story.plans()
    story.wakes()
    again = RankSaid(rank=1, attempt=1, message=WARNING.message)
    entry = event_after(story, again)
    assert entry is not None
    assert entry.attempt == 1


def test_a_mismatch_is_reported_once() -> None:
    story = Story.training(world_size=3)
    said = StateMismatch(round=1, workers=(1,), message="numpy is 2.4 here and 2.5 there")
    dispute = RankSaid(rank=0, attempt=0, message=said)
    again = RankSaid(rank=2, attempt=0, message=said)
    sentence = "worker 1: numpy is 2.4 here and 2.5 there"
    assert event_after(story, dispute) == NewEvent(kind="state_mismatch", message=sentence)
    assert event_after(story, again) is None


def test_a_broken_group_is_reported_once() -> None:
    story = Story.training(world_size=3)
    round_number = story.job.group.round
    lost = PeerLost(round=round_number, message="the connection to rank 0 is closed")
    entry = event_after(story, RankSaid(rank=1, attempt=0, message=lost))
    assert entry == of_rank(
        "peer_lost",
        "rank 1 has lost a rank that it trains with: the connection to rank 0 is closed",
    )
    assert event_after(story, RankSaid(rank=2, attempt=0, message=lost)) is None


@pytest.mark.parametrize("end", [Story.is_stopped, Story.is_interrupted])
def test_a_lost_peer_of_an_ending_job_is_no_event(
    end: Callable[[Story], Story],
) -> None:
    story = end(Story.training(world_size=2))
    round_number = story.job.group.round
    lost = PeerLost(round=round_number, message="the channel to rank 0 is closed")
    assert event_after(story, RankSaid(rank=1, attempt=0, message=lost)) is None


def test_a_lost_peer_of_an_earlier_round_is_no_event() -> None:
    story = Story.training(world_size=3)
    late = PeerLost(round=story.job.group.round - 1, message="the channel is closed")
    assert event_after(story, RankSaid(rank=1, attempt=0, message=late)) is None


def test_the_end_of_an_unneeded_agent_is_no_event() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    story.is_stopped().plans()
    assert (
        event_after(
            story, AgentLost(host=LOCAL_HOST, agent_number=1, message="another one is started")
        )
        is None
    )


def test_a_host_without_the_data_of_a_job_is_an_event() -> None:
    story = Story.training(hosts=("a", "b"), world_size=2).beats(1, 5)
    refused = PermanentFailure(
        reason=Reason.INVALID_DATASET, message="/d is empty", is_of_data=True
    )
    assert event_after(story, RankSaid(rank=1, attempt=0, message=refused)) == of_rank(
        "host_set_aside", "rank 1 was refused on b: /d is empty"
    )
    failing = Story.training(hosts=("a", "b"), world_size=2)
    assert event_after(failing, RankSaid(rank=1, attempt=0, message=refused)) is None


def test_a_host_that_starts_no_agent_is_told_once() -> None:
    story = Story.submitted(hosts=("a", "b"), world_size=2).is_admitted()
    told = []
    for number, why in enumerate(["its disk is full", "its disk is full", "it is away"], 1):
        story.plans()
        refused = AgentNotStarted(host="b", agent_number=number, message=why)
        told.append(event_after(story, refused))
        story.observes(refused).passes(60)
    assert [it and it.message for it in told] == ["its disk is full", None, "it is away"]


def test_the_loss_of_an_agent_with_ranks_is_an_event() -> None:
    story = Story.running(world_size=1).is_stopped()
    story.plans()
    assert (
        event_after(story, AgentLost(host=LOCAL_HOST, agent_number=1, message="the agent died"))
        is not None
    )
