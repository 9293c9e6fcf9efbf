"""Who makes us write more than anybody reads is summed up; what matters is written whole."""

from contextlib import suppress
from typing import Any

import pytest
from hand import Hand
from structlog import DropEvent

from muster.repeats import LINES_OF_A_KIND, LINES_TOGETHER, WHILE_SECONDS, Repeats


@pytest.fixture
def hand() -> Hand[float]:
    return Hand(0.0)


@pytest.fixture
def repeats(hand: Hand[float]) -> Repeats:
    return Repeats(hand, {"request_refused", "connection_refused"})


def written(repeats: Repeats, times: int, action: str, caller: str) -> list[dict[str, Any]]:
    """Return which of so many lines are written."""
    lines = []
    for _ in range(times):
        event = {"action": action, "caller": caller, "reason": "no-token"}
        with suppress(DropEvent):
            lines.append(dict(repeats(None, "warning", event)))
    return lines


def test_what_repeats_is_summed_up_with_the_next_line(repeats: Repeats, hand: Hand[float]) -> None:
    assert len(written(repeats, LINES_OF_A_KIND + 5, "request_refused", "a")) == LINES_OF_A_KIND
    (other,) = written(repeats, 1, "request_refused", "b")
    assert other["withheld"] == 5
    assert written(repeats, 2, "request_refused", "a") == []
    hand.now += WHILE_SECONDS
    first, second = written(repeats, 2, "request_refused", "a")
    assert (first["withheld"], "withheld" in second) == (2, False)


def test_callers_without_number_are_summed_up_together(repeats: Repeats) -> None:
    callers = [f"{number}" for number in range(LINES_TOGETHER + 7)]
    lines = [line for one in callers for line in written(repeats, 1, "connection_refused", one)]
    assert len(lines) == LINES_TOGETHER


def test_whatever_else_happens_is_written_each_time(repeats: Repeats) -> None:
    assert len(written(repeats, 5000, "request_answered", "a")) == 5000
