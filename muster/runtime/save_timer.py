"""When a checkpoint is due if `checkpoint_every` is auto: saving takes at most 2 % of the time.

Only the process that saves decides it, as it depends on a clock. That does not change the bits.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

SHARE: Final = 0.02
"""The largest share of the time that is spent on saving."""

SECONDS_MIN: Final = 1.0
"""Pause before the first save, whose cost is unknown, and the shortest between two."""

SECONDS_MAX: Final = 1800.0
"""The longest pause. Saves that take more than 36 seconds take more than `SHARE`."""


def pause_seconds(cost_seconds: float) -> float:
    """Return the time from the end of a save of this cost until the next one is due."""
    return min(max(cost_seconds / SHARE, SECONDS_MIN), SECONDS_MAX)


class SaveTimer:
    """Measures what a save costs, and tells when the next one is due."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        self._ended = clock()
        self._cost_seconds = 0.0

    def is_due(self) -> bool:
        return self._clock() - self._ended >= pause_seconds(self._cost_seconds)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save; one that fails has its cost, too."""
        began = self._clock()
        try:
            yield
        finally:
            self._ended = self._clock()
            self._cost_seconds = self._ended - began
