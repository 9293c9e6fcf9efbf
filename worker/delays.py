"""How long the end of a rank waits to be told: once told it is never told differently.

Two things hold it up, and they are not the same. What was killed and does not go hangs in the
kernel: two seconds of looking are enough to know. An agent without a descriptor has not looked at
all: to it nothing is left of anybody, and no record is there to be read.
"""

import time
from collections.abc import Callable
from typing import Final

from muster.sight import require_descriptors

CONTAINMENT_SECONDS: Final = 2.0
"""A process that survives SIGKILL for this long hangs in the kernel; the rank's end is reported
all the same, so that nobody waits for ever."""

BLIND_SECONDS: Final = 10.0
"""A shortage of descriptors passes in less, or not by itself: when it is the dead who hold them
all, an agent that waited for ever would never let go of them. As long as a coordinator waits for an
end that it has ordered, before it replaces the agent and ends what that has left."""


class Delays:
    """Since when which rank's end waits."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: dict[int, float] = {}
        self._looking_since: dict[int, float] = {}

    def holds(self, rank: int) -> bool:
        """Return whether an end must wait although nothing else is known against telling it."""
        since = self._since.setdefault(rank, self._now())
        if _can_look() or self._now() >= since + BLIND_SECONDS:
            self._looking_since.setdefault(rank, self._now())
            return False
        self._looking_since.pop(rank, None)
        return True

    def is_over(self, rank: int) -> bool:
        """Return whether it has been looked for long enough, whatever there was to be seen."""
        return self._now() >= self._looking_since[rank] + CONTAINMENT_SECONDS

    def forget(self, rank: int) -> None:
        """It is told."""
        del self._since[rank], self._looking_since[rank]


def _can_look() -> bool:
    try:
        require_descriptors()
    except OSError:
        return False
    return True
