"""How a coordinator is told to end: hand over, or shut down. And how long it waits for its rows.

Whoever told it waits as well, a person or an init system. So of a database that is away it waits
for some seconds, from when it was told or from when the database went, whichever was later.
"""

from collections.abc import Callable
from typing import Final

PATIENCE_SECONDS: Final = 5.0


class Farewell:
    """What has been asked of a coordinator."""

    def __init__(self, clock: Callable[[], float], patience_seconds: float) -> None:
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._told_at = float("inf")
        self.is_leaving = False
        """It hands over: agents and ranks go on."""
        self.is_draining = False
        """It shuts down, once every job has saved and is back in the queue."""

    def leave(self) -> None:
        self.is_leaving = True
        self._note_when()

    def drain(self) -> None:
        self.is_draining = True
        self._note_when()

    def has_waited_long_enough(self, since: float) -> bool:
        """Return whether a database that has been away `since` then is waited for no longer."""
        return self._clock() >= max(since, self._told_at) + self._patience_seconds

    def _note_when(self) -> None:
        """Who is told again and again waits no longer for it."""
        self._told_at = min(self._told_at, self._clock())
