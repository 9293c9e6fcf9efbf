"""When a pool takes no step, and which rank is at fault."""

from muster.contracts.job import JobStatus, Reason
from tests.support.stories import Story, groups, kills, starts


def test_a_pause_and_its_end_are_group_rounds() -> None:
    story = Story.training(world_size=2)
    (pause,) = groups(story.is_paused().plans())
    assert (pause.workers, pause.paused, pause.round) == ((0, 1), True, 2)
    assert story.job.status is JobStatus.RUNNING, "until all members have joined the round"
    assert story.joins_group(0).plans() == []
    (move,) = story.joins_group(1).plans()
    assert (move.status, move.reason) == (JobStatus.PAUSED, Reason.PAUSED_BY_USER)
    assert groups(story.runs_for(60)) == []
    (resumed,) = groups(story.is_resumed().plans())
    assert (resumed.workers, resumed.paused, resumed.round) == ((0, 1), False, 3)
    assert story.job.status is JobStatus.RUNNING


def test_a_paused_pool_replaces_workers_and_stays_paused() -> None:
    story = Story.training(world_size=2).is_paused()
    story.settles()
    (group,) = groups(story.dies(1).plans())
    assert group.paused
    assert story.job.status is JobStatus.RECOVERING
    story.wakes()
    story.settles()
    assert story.job.status is JobStatus.PAUSED
    assert story.job.group.workers == (0, 2)


def test_a_paused_rank_needs_no_progress() -> None:
    story = Story.training(world_size=2, progress_timeout_seconds=20).is_paused()
    story.settles()
    assert kills(story.runs_for(100)) == {}
    story.is_resumed().plans()
    assert kills(story.runs_for(19)) == {}, "the timeout restarts"
    assert set(kills(story.runs_for(2))) == {0, 1}


def test_a_waiting_newcomer_needs_no_progress() -> None:
    story = Story.gathering(world_size=2, min_workers=2, progress_timeout_seconds=20).is_ready(0)
    assert kills(story.runs_for(60)) == {}


def test_a_program_that_is_never_ready_is_replaced() -> None:
    story = Story.gathering(
        world_size=2, min_workers=2, progress_timeout_seconds=20, start_grace_seconds=50
    )
    story.is_ready(0).says_hello(1)
    assert kills(story.runs_for(49)) == {}
    (killed,) = kills(story.runs_for(2)).items()
    assert killed[0] == 1
    assert killed[1].message == "sent heartbeats but was not ready to train for 50 s and was killed"


def test_without_a_limit_a_start_may_take_any_time() -> None:
    story = Story.gathering(world_size=1, start_grace_seconds=50).says_hello(0)
    assert kills(story.runs_for(1000)) == {}


def test_ranks_that_wait_for_a_hung_rank_are_kept() -> None:
    story = Story.training(world_size=3, progress_timeout_seconds=20)
    killed = {}
    for _ in range(15):
        story.passes(2).beats(0, waiting=True).beats(1).beats(2, waiting=True)
        killed |= kills(story.plans())
    assert {rank: cause.reason for rank, cause in killed.items()} == {1: Reason.NO_PROGRESS}
    story.settles()
    assert [rank.restarts for rank in story.job.ranks] == [0, 1, 0]


def test_only_a_new_heartbeat_proves_lack_of_progress() -> None:
    story = Story.training(world_size=1, progress_timeout_seconds=1).beats(0, step=1)
    assert kills(story.passes(2).plans()) == {}
    assert kills(story.beats(0, step=1, waiting=True).plans()) == {}
    assert kills(story.passes(2).beats(0, step=1).plans()) == {}, "the timeout restarts"
    assert set(kills(story.passes(2).beats(0, step=1).plans())) == {0}


def test_training_pauses_and_resumes_with_its_workers() -> None:
    story = Story.training(world_size=2, min_workers=2).dies(1)
    assert groups(story.plans()) == [], "the remaining rank waits at its step"
    assert (story.job.status, story.job.reason) == (JobStatus.PAUSED, Reason.TOO_FEW_WORKERS)
    assert "1 of at least 2 workers are active" in story.job.message
    assert starts(story.wakes()) == [1]
    story.settles()
    assert story.job.status is JobStatus.RUNNING
    assert story.job.group.workers == (0, 2)
