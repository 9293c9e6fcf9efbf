"""A program may say anything; what is kept of it can be stored and shown."""

from math import inf, nan

from stories import Story

from coordinator.wording import SAID_LIMIT
from muster.contracts.job import Reason


def test_numbers_that_are_none_are_not_kept() -> None:
    story = Story.running(world_size=1)
    story.beats(0, step=3, loss=nan, metrics={"a": inf, "b": 0.5})
    assert story.rank(0).loss is None
    assert story.rank(0).metrics == {"b": 0.5}


def test_a_refusal_is_cut_and_cleaned() -> None:
    story = Story.running(world_size=1)
    story.refuses(0, Reason.INVALID_PROGRAM, "no\0 good" + "x" * 50_000)
    assert story.job.verdict is not None
    message = story.job.verdict.message
    assert message.startswith("rank 0: no  good")
    assert len(message) < SAID_LIMIT + 20
