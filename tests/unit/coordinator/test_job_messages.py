"""What is believed of what ranks say, and what is counted of it, told as stories."""

import pytest
from stories import Story, exited

from muster.contracts.messages import Executing, Hello, RankSaid, RankSpawned, Warned

# Messages that are not to be believed


@pytest.mark.parametrize("incarnation", [-1, 0, 2])
def test_a_stale_incarnations_message_changes_nothing(incarnation: int) -> None:
    story = Story.running(world_size=2).dies(1)
    story.plans()
    story.wakes()
    assert story.rank(1).incarnation == 1
    before = story.job
    story.rank_says(1, Hello(), incarnation).rank_says(1, Executing(), incarnation)
    story.rank_says(1, Warned(message="late"), incarnation)
    story.hears(exited(1, incarnation, code=0)).hears(exited(1, incarnation, signal=9))
    story.hears(
        RankSpawned(rank=1, incarnation=incarnation, pid=1, start_ticks=1, boot_id="b", node="n")
    )
    assert story.job is before


@pytest.mark.parametrize("rank", [-1, 2, 4096])
def test_a_rank_that_does_not_exist_cannot_speak(rank: int) -> None:
    story = Story.running(world_size=2)
    before = story.job
    story.hears(RankSaid(rank=rank, incarnation=0, message=Hello()))
    story.hears(exited(rank, 0, code=0))
    assert story.job is before


def test_a_death_that_is_told_twice_is_counted_once() -> None:
    story = Story.running(world_size=1).dies(0)
    before = story.job
    assert story.dies(0).job is before


# Figures


def test_a_beat_says_where_the_rank_is() -> None:
    story = Story.running(world_size=1)
    story.beats(
        0,
        step=12,
        epoch=1,
        shard_idx=2,
        line_idx=3,
        loss=0.25,
        metrics={"accuracy": 0.5},
        checkpoints_saved=2,
        last_checkpoint_step=10,
    )
    rank = story.rank(0)
    assert (rank.step, rank.total_steps, rank.epoch) == (12, 100, 1)
    assert (rank.shard_idx, rank.line_idx, rank.loss) == (2, 3, 0.25)
    assert rank.metrics == {"accuracy": 0.5}
    assert (rank.checkpoints_saved, rank.last_checkpoint_step) == (2, 10)


def test_checkpoints_are_counted_over_all_incarnations() -> None:
    story = Story.running(world_size=1).beats(0, step=10, checkpoints_saved=2).dies(0)
    story.plans()
    story.wakes()
    story.says_hello(0).beats(0, step=15, checkpoints_saved=1)
    assert story.rank(0).checkpoints_before + story.rank(0).checkpoints_saved == 3


def test_throughput_is_steps_over_time_and_nothing_for_a_rank_that_is_gone() -> None:
    story = Story.running(world_size=1)
    for step in range(0, 100, 10):
        story.beats(0, step=step).passes(1)
    assert story.rank(0).throughput_steps_per_sec == pytest.approx(10)
    story.dies(0)
    assert story.rank(0).throughput_steps_per_sec == 0


def test_steps_that_come_again_after_a_recovery_are_no_negative_throughput() -> None:
    story = Story.running(world_size=1).beats(0, step=100).passes(2).beats(0, step=3)
    assert story.rank(0).throughput_steps_per_sec == 0
