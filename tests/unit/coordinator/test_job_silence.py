"""Silent ranks, and ranks without progress."""

import pytest

from coordinator.decide.actions import Suspect
from muster.contracts.job import JobStatus, Reason
from muster.contracts.messages import Executing
from muster.contracts.rank import ProcessState
from tests.support.stories import Story, kills


def test_a_late_heartbeat_makes_a_suspect_for_a_while() -> None:
    story = Story.running(world_size=2)
    story.passes(5).beats(0)
    assert story.plans() == [Suspect(rank=1)]
    assert story.rank(1).process is ProcessState.SUSPECT
    assert story.job.status is JobStatus.RUNNING, "a suspect may live"
    assert story.plans() == []
    story.beats(1)
    assert story.rank(1).process is ProcessState.LIVE
    assert story.plans() == []


def test_a_silent_rank_is_killed() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10)
    story.passes(5).beats(0).plans()
    story.passes(4.9).beats(0)
    assert story.plans() == []
    planned = story.passes(0.1).plans()
    (cause,) = kills(planned).values()
    assert list(kills(planned)) == [1]
    assert cause.reason is Reason.HEARTBEAT_TIMEOUT
    assert cause.message == "sent no heartbeat for 10 s and was killed"
    assert story.passes(3).beats(0).plans() == [], "it is killed once"
    story.dies(1).plans()
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.reason is Reason.HEARTBEAT_TIMEOUT
    assert story.job.message == (
        "rank 1 sent no heartbeat for 10 s and was killed; it is started again "
        "(failure 1 of 5 in a row without a new checkpoint)"
    )


@pytest.mark.parametrize("limit", [None, 30.0])
def test_a_rank_without_progress_is_killed_if_limited(limit: float | None) -> None:
    story = Story.running(world_size=2, progress_timeout_seconds=limit)
    killed = kills(story.runs_for(40))
    if limit is None:
        assert killed == {}
    else:
        assert {rank: cause.reason for rank, cause in killed.items()} == {
            0: Reason.NO_PROGRESS,
            1: Reason.NO_PROGRESS,
        }


def test_an_occasional_step_is_progress() -> None:
    story = Story.running(world_size=1, progress_timeout_seconds=30)
    for step in range(1, 5):
        assert kills(story.runs_for(28)) == {}
        story.beats(0, step=step)


def test_the_start_does_not_count_as_lack_of_progress() -> None:
    story = Story.starting(world_size=1, progress_timeout_seconds=30, start_grace_seconds=120)
    story.passes(20).rank_says(0, Executing()).passes(40).says_hello(0)
    assert kills(story.plans()) == {}
    assert kills(story.runs_for(29)) == {}
    assert kills(story.runs_for(2))[0].reason is Reason.NO_PROGRESS


def test_a_repeated_hello_is_no_progress() -> None:
    story = Story.running(world_size=1, progress_timeout_seconds=30)
    story.runs_for(20)
    story.says_hello(0)
    assert kills(story.runs_for(11))[0].reason is Reason.NO_PROGRESS
