"""The deadline of a call that consists of several waits."""

import time

from muster.collectives.errors import Timeout


class Deadline:
    """Starts when it is created."""

    def __init__(self, seconds: float, waited_for: str) -> None:
        self.seconds = seconds
        self._waited_for = waited_for
        self._at = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        """Remaining time, at least 0."""
        return max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raise `Timeout` if no time remains."""
        if self.left_seconds == 0:
            raise Timeout(self.seconds, self._waited_for)
