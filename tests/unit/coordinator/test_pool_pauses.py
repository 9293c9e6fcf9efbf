"""When a pool takes no step, and who is to blame for it, told as stories."""

from stories import Story, kills, layouts, starts

from muster.contracts.job import JobStatus, Reason


def test_a_pause_is_a_layout_in_which_nobody_steps_and_resuming_is_the_next() -> None:
    story = Story.training(world_size=2)
    (pause,) = layouts(story.is_paused().plans())
    assert (pause.workers, pause.paused, pause.generation) == ((0, 1), True, 2)
    assert story.job.status is JobStatus.RUNNING, "until all of them have come to it"
    assert story.takes_up(0).plans() == []
    (move,) = story.takes_up(1).plans()
    assert (move.status, move.reason) == (JobStatus.PAUSED, Reason.PAUSED_BY_USER)
    assert layouts(story.goes_on(60)) == []
    (goes_on,) = layouts(story.is_resumed().plans())
    assert (goes_on.workers, goes_on.paused, goes_on.generation) == ((0, 1), False, 3)
    assert story.job.status is JobStatus.RUNNING


def test_a_pool_that_is_paused_is_looked_after_and_stays_paused() -> None:
    story = Story.training(world_size=2).is_paused()
    story.settles()
    (layout,) = layouts(story.dies(1).plans())
    assert layout.paused
    assert story.job.status is JobStatus.RECOVERING
    story.wakes()
    story.settles()
    assert story.job.status is JobStatus.PAUSED
    assert story.job.layout.workers == (0, 2)


def test_who_is_paused_is_not_blamed_for_taking_no_step() -> None:
    story = Story.training(world_size=2, progress_timeout_seconds=20).is_paused()
    story.settles()
    assert kills(story.goes_on(100)) == {}
    story.is_resumed().plans()
    assert kills(story.goes_on(19)) == {}, "its time begins anew"
    assert set(kills(story.goes_on(2))) == {0, 1}


def test_a_newcomer_that_waits_for_others_is_not_blamed_for_taking_no_step() -> None:
    story = Story.gathering(world_size=2, min_workers=2, progress_timeout_seconds=20).is_ready(0)
    assert kills(story.goes_on(60)) == {}


def test_a_program_that_hangs_before_it_is_ready_is_replaced_after_the_start_grace() -> None:
    story = Story.gathering(
        world_size=2, min_workers=2, progress_timeout_seconds=20, start_grace_seconds=50
    )
    story.is_ready(0).says_hello(1)
    assert kills(story.goes_on(49)) == {}
    (killed,) = kills(story.goes_on(2)).items()
    assert killed[0] == 1
    assert killed[1].message == "beat but was not ready to train for 50 s and was killed"


def test_without_a_limit_a_program_may_take_its_time_to_begin() -> None:
    story = Story.gathering(world_size=1, start_grace_seconds=50).says_hello(0)
    assert kills(story.goes_on(1000)) == {}


def test_who_waits_for_a_rank_that_hangs_is_not_blamed_with_it() -> None:
    story = Story.training(world_size=3, progress_timeout_seconds=20)
    killed = {}
    for _ in range(15):
        story.passes(2).beats(0, waiting=True).beats(1).beats(2, waiting=True)
        killed |= kills(story.plans())
    assert {rank: cause.reason for rank, cause in killed.items()} == {1: Reason.NO_PROGRESS}
    story.settles()
    assert [rank.restarts for rank in story.job.ranks] == [0, 1, 0]


def test_a_rank_whose_last_word_is_old_is_not_blamed_before_it_has_beaten() -> None:
    story = Story.training(world_size=1, progress_timeout_seconds=1).beats(0, step=1)
    assert kills(story.passes(2).plans()) == {}
    assert kills(story.beats(0, step=1, waiting=True).plans()) == {}
    assert kills(story.passes(2).beats(0, step=1).plans()) == {}, "its time begins anew"
    assert set(kills(story.passes(2).beats(0, step=1).plans())) == {0}


def test_with_too_few_workers_training_pauses_and_goes_on_by_itself() -> None:
    story = Story.training(world_size=2, min_workers=2).dies(1)
    assert layouts(story.plans()) == [], "who is left waits where it is"
    assert (story.job.status, story.job.reason) == (JobStatus.PAUSED, Reason.TOO_FEW_WORKERS)
    assert "1 of at least 2 workers are active" in story.job.message
    assert starts(story.wakes()) == [1]
    story.settles()
    assert story.job.status is JobStatus.RUNNING
    assert story.job.layout.workers == (0, 2)
