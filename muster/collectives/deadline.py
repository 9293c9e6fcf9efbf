"""How long a call may still take, however many waits it is made of."""

import time

from muster.collectives.errors import TimedOut


class Deadline:
    """Runs from its making."""

    def __init__(self, seconds: float, waited_for: str) -> None:
        self._seconds = seconds
        self._waited_for = waited_for
        self._at = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        """Never below 0."""
        return max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raise `TimedOut` if there is nothing left."""
        if self.left_seconds == 0:
            raise TimedOut(self._seconds, self._waited_for)
