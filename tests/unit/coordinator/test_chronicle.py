from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from stories import Story, beat, exited
from unit.coordinator.heirs import successor

from coordinator.actions import KillProcess, Move, Start, Suspect
from coordinator.chronicle import Entry, narrate
from coordinator.happenings import AgentJoined, AgentLost, Happening, StopAsked, Taken
from coordinator.rows import inherited, inherited_with_agent
from coordinator.snapshot import Cause, JobSnapshot
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import Disputed, Hello, RankSaid, RankSpawned, Stranded, Warned

SILENT = Cause(reason=Reason.HEARTBEAT_TIMEOUT, message="sent no heartbeat for 10 s")


def told(story: Story, happening: Happening) -> Entry | None:
    before = story.job
    return narrate(before, happening, story.hears(happening).job)


def of_rank(kind: str, message: str) -> Entry:
    return Entry(kind=kind, message=message, rank=1, incarnation=0)


WARNING = RankSaid(rank=1, incarnation=0, message=Warned(message="took an older checkpoint"))


@pytest.mark.parametrize(
    ("happening", "entry"),
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
        (WARNING, of_rank("warned", "rank 1 took an older checkpoint")),
        (
            Taken(action=KillProcess(rank=1, cause=SILENT)),
            of_rank("rank_killed", "rank 1 sent no heartbeat for 10 s"),
        ),
        (
            Taken(action=Suspect(rank=1)),
            of_rank("rank_suspected", "rank 1 is late with its heartbeat"),
        ),
        (
            Taken(action=Move(status=JobStatus.RECOVERING, message="rank 1 died")),
            Entry(kind="job_recovering", message="the job is RECOVERING: rank 1 died"),
        ),
        (
            Taken(action=Move(status=JobStatus.COMPLETED)),
            Entry(kind="job_completed", message="the job is COMPLETED"),
        ),
        (
            AgentLost(generation=1, message="the agent died"),
            Entry(kind="agent_lost", message="the agent died"),
        ),
    ],
)
def test_what_is_news_is_told_once(happening: Happening, entry: Entry) -> None:
    story = Story.running(world_size=2)
    assert told(story, happening) == entry


def test_that_a_job_cannot_go_on_is_told_at_once_and_why_when_it_has_failed() -> None:
    story = Story.running(world_size=2, max_restarts=0).exits(1, code=3)
    why = "rank 1 exited with code 3 and may not be restarted"
    stopping = Taken(action=Move(status=JobStatus.STOPPING, message=why))
    words = "the job cannot go on; ranks that are left are saving and exiting"
    assert told(story, stopping) == Entry(kind="job_failing", message=words)
    failed = Taken(action=Move(status=JobStatus.FAILED, message=why))
    assert told(story, failed) == Entry(kind="job_failed", message=f"the job is FAILED: {why}")


def test_an_agent_that_has_ranks_is_news_and_the_first_one_is_not() -> None:
    story = Story.running(world_size=2).agent_is_lost(living=[1])
    story.plans()
    joined = AgentJoined(generation=story.job.generation)
    adopted = Entry(kind="agent_adopted", message="the job's agent is there, its ranks go on")
    assert told(story, joined) == adopted
    story = Story.submitted().is_admitted()
    story.plans()
    assert told(story, AgentJoined(generation=story.job.generation)) is None


@pytest.mark.parametrize(
    "take_up", [partial(inherited, living=[0, 1]), inherited_with_agent], ids=["alone", "agent"]
)
def test_a_coordinator_that_finds_ranks_says_that_it_is_new(
    take_up: Callable[..., JobSnapshot],
) -> None:
    story = successor(Story.running(world_size=2), take_up)
    sentence = "a new coordinator has taken over; the job's agent is there, its ranks go on"
    story.plans()
    joined = AgentJoined(generation=story.job.generation)
    assert told(story, joined) == Entry(kind="agent_adopted", message=sentence)
    again = AgentJoined(generation=story.agent_drops().job.generation)
    adopted = Entry(kind="agent_adopted", message="the job's agent is there, its ranks go on")
    assert told(story, again) == adopted


@pytest.mark.parametrize("happening", [exited(1, 0, code=3), WARNING])
def test_what_an_agent_says_again_is_told_once(happening: Happening) -> None:
    story = Story.running(world_size=2).hears(happening)
    assert told(story, happening) is None


def test_a_process_is_introduced_once_by_its_pid() -> None:
    story = Story.starting(world_size=2)
    spawned = RankSpawned(rank=1, incarnation=0, pid=77, start_ticks=1, boot_id="boot", node="node")
    assert told(story, spawned) == of_rank("rank_started", "rank 1 runs as pid 77")
    assert told(story, spawned) is None


def test_what_was_said_at_the_submission_is_no_reason_of_a_later_move() -> None:
    story = Story.running(world_size=2)
    story.job = replace(story.job, note="env shows HF_TOKEN")
    recovering = Move(status=JobStatus.RECOVERING, message="rank 1 died")
    entry = Entry(kind="job_recovering", message="the job is RECOVERING: rank 1 died")
    assert told(story, Taken(action=recovering)) == entry
    running = Move(status=JobStatus.RUNNING, message="env shows HF_TOKEN")
    entry = Entry(kind="job_running", message="the job is RUNNING")
    assert told(story, Taken(action=running)) == entry


def test_an_end_that_we_have_made_is_told_once_and_never_before_a_start() -> None:
    story = Story.starting(world_size=2).is_stopped(StopRequest.FORCED)
    story.plans()
    spawned = RankSpawned(rank=1, incarnation=0, pid=77, start_ticks=1, boot_id="boot", node="node")
    assert told(story, spawned) is None
    assert told(story, exited(1, 0, signal=9)) is None


def test_who_was_to_be_killed_and_was_faster_says_how_it_ended() -> None:
    story = Story.running(world_size=2).is_stopped(StopRequest.FORCED)
    story.plans()
    entry = of_rank("rank_exited", "rank 1 exited with code 3")
    assert told(story, exited(1, 0, code=3)) == entry


@pytest.mark.parametrize(
    "happening",
    [
        RankSaid(rank=1, incarnation=0, message=Hello()),
        RankSaid(rank=1, incarnation=0, message=beat(step=1)),
        StopAsked(request=StopRequest.GRACEFUL, grace_seconds=1),
        Taken(action=Start(rank=1)),
        Taken(action=Move(status=JobStatus.RUNNING, message="the same, said otherwise")),
        RankSaid(rank=1, incarnation=7, message=Warned(message="from an incarnation unheard of")),
        RankSaid(rank=7, incarnation=0, message=Warned(message="from a rank unheard of")),
        AgentLost(generation=7, message="another agent died"),
    ],
)
def test_what_is_no_news_is_not_told(happening: Happening) -> None:
    assert told(Story.running(world_size=2), happening) is None


def test_the_next_incarnation_may_warn_of_the_same() -> None:
    story = Story.running(world_size=2).hears(WARNING).dies(1)
    story.plans()
    story.wakes()
    again = RankSaid(rank=1, incarnation=1, message=WARNING.message)
    entry = told(story, again)
    assert entry is not None
    assert entry.incarnation == 1


def test_in_what_a_worker_differs_is_told_though_several_say_so() -> None:
    story = Story.training(world_size=3)
    said = Disputed(generation=1, workers=(1,), message="numpy is 2.4 here and 2.5 there")
    dispute = RankSaid(rank=0, incarnation=0, message=said)
    again = RankSaid(rank=2, incarnation=0, message=said)
    sentence = "worker 1: numpy is 2.4 here and 2.5 there"
    assert told(story, dispute) == Entry(kind="workers_disputed", message=sentence)
    assert told(story, again) is None


def test_a_group_that_falls_apart_is_told_once_whoever_loses_it() -> None:
    story = Story.training(world_size=3)
    generation = story.job.layout.generation
    lost = Stranded(generation=generation, message="the channel to rank 0 is closed")
    entry = told(story, RankSaid(rank=1, incarnation=0, message=lost))
    assert entry == of_rank(
        "rank_stranded",
        "rank 1 has lost the group of ranks 0, 1, 2, in this order: "
        "the channel to rank 0 is closed",
    )
    assert told(story, RankSaid(rank=2, incarnation=0, message=lost)) is None


@pytest.mark.parametrize("end", [Story.is_stopped, Story.is_interrupted])
def test_that_ranks_part_which_were_asked_to_go_is_no_trouble(
    end: Callable[[Story], Story],
) -> None:
    story = end(Story.training(world_size=2))
    generation = story.job.layout.generation
    lost = Stranded(generation=generation, message="the channel to rank 0 is closed")
    assert told(story, RankSaid(rank=1, incarnation=0, message=lost)) is None


def test_a_group_that_has_been_replaced_already_is_no_news() -> None:
    story = Story.training(world_size=3)
    late = Stranded(generation=story.job.layout.generation - 1, message="the channel is closed")
    assert told(story, RankSaid(rank=1, incarnation=0, message=late)) is None


def test_that_an_agent_goes_which_nobody_needs_any_more_is_no_loss() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    story.is_stopped().plans()
    assert told(story, AgentLost(generation=1, message="another one is started")) is None


def test_that_an_agent_is_lost_whose_ranks_are_saving_is_told() -> None:
    story = Story.running(world_size=1).is_stopped()
    story.plans()
    assert told(story, AgentLost(generation=1, message="the agent died")) is not None
