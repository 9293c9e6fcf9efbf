"""When `checkpoint_every: auto` saves, by a clock that the test sets."""

from contextlib import suppress

import pytest

from muster.runtime.save_timer import SaveTimer, pause_seconds


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("cost_seconds", "seconds"),
    [(0.0, 1.0), (0.01, 1.0), (0.02, 1.0), (0.1, 5.0), (3.0, 150.0), (36.0, 1800.0), (1e6, 1800.0)],
)
def test_the_pause_follows_from_the_cost(cost_seconds: float, seconds: float) -> None:
    assert pause_seconds(cost_seconds) == pytest.approx(seconds)


def test_each_save_decides_when_the_next_is_due() -> None:
    clock = Clock()
    timer = SaveTimer(clock)
    seen = []
    # Seconds until the look, and what a save costs then.
    for passed, cost in [(0.9, 0.0), (0.1, 0.1), (4.9, 0.0), (0.2, 1.0), (49.9, 0.0), (0.2, 0.0)]:
        clock.now += passed
        seen.append(timer.is_due())
        if timer.is_due():
            with timer.saving():
                clock.now += cost
    assert seen == [False, True, False, True, False, True]


def test_a_save_that_fails_is_not_repeated_at_once() -> None:
    clock = Clock()
    timer = SaveTimer(clock)
    clock.now += 1.0
    with suppress(OSError), timer.saving():
        clock.now += 0.2
        raise OSError
    clock.now += 9.0
    assert not timer.is_due()
    clock.now += 1.5
    assert timer.is_due()
