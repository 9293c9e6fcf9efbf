"""Messages of ranks: stale ones are ignored, progress is recorded."""

from datetime import timedelta
from typing import Any

import pytest

from muster.contracts.messages.agent import RankSaid, RankSpawned
from muster.contracts.messages.rank import Executing, Hello, Warned
from muster.contracts.rank import RankProgress
from tests.support.database_samples import NOON
from tests.support.stories import Story, exited

LATER = NOON + timedelta(minutes=1)

# Stale messages


@pytest.mark.parametrize("attempt", [-1, 0, 2])
def test_messages_of_another_attempt_are_ignored(attempt: int) -> None:
    story = Story.running(world_size=2).dies(1)
    story.plans()
    story.wakes()
    assert story.rank(1).attempt.number == 1
    before = story.job
    story.rank_says(1, Hello(), attempt).rank_says(1, Executing(), attempt)
    story.rank_says(1, Warned(message="late"), attempt)
    story.observes(exited(1, attempt, code=0)).observes(exited(1, attempt, signal=9))
    story.observes(
        RankSpawned(
            rank=1, attempt=attempt, pid=1, start_ticks=1, boot_id="b", node="n", pid_namespace=1
        )
    )
    assert story.job is before


@pytest.mark.parametrize("rank", [-1, 2, 4096])
def test_messages_of_unknown_ranks_are_ignored(rank: int) -> None:
    story = Story.running(world_size=2)
    before = story.job
    story.observes(RankSaid(rank=rank, attempt=0, message=Hello()))
    story.observes(exited(rank, 0, code=0))
    assert story.job is before


# Progress


def test_a_heartbeat_updates_the_progress() -> None:
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
    assert rank.attempt.checkpoints_saved == 2
    assert rank.progress == RankProgress(
        step=12,
        total_steps=100,
        epoch=1,
        shard_idx=2,
        line_idx=3,
        loss=0.25,
        metrics={"accuracy": 0.5},
        last_checkpoint_step=10,
    )


@pytest.mark.parametrize(
    ("step", "saved", "kept"),
    [
        (None, {}, (10, 64, NOON)),
        (8, {}, (8, 64, NOON)),
        (12, {"last_checkpoint_bytes": 32, "last_checkpoint_at": LATER}, (12, 32, LATER)),
    ],
    ids=["before it has restored any", "restored", "saved"],
)
def test_a_new_attempt_keeps_what_was_saved(
    step: int | None, saved: dict[str, Any], kept: tuple[object, ...]
) -> None:
    first = {"last_checkpoint_bytes": 64, "last_checkpoint_at": NOON}
    story = Story.running(world_size=1).beats(0, step=11, last_checkpoint_step=10, **first)
    story.dies(0).plans()
    story.wakes()
    story.says_hello(0).beats(0, step=12, last_checkpoint_step=step, **saved)
    progress = story.rank(0).progress
    found = (
        progress.last_checkpoint_step,
        progress.last_checkpoint_bytes,
        progress.last_checkpoint_at,
    )
    assert found == kept


def test_throughput_is_steps_per_second() -> None:
    story = Story.running(world_size=1)
    for step in range(0, 100, 10):
        story.beats(0, step=step).passes(1)
    assert story.rank(0).attempt.throughput.steps_per_sec == pytest.approx(10)
    story.dies(0)
    assert story.rank(0).attempt.throughput.steps_per_sec == 0
