"""One instant on two clocks: monotonic ones are for decisions, wall clocks for people."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from coordinator.snapshot import NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One instant, on the monotonic clock of this process and on the wall."""

    monotonic: float
    wall: datetime

    def wall_of(self, monotonic: float) -> datetime | None:
        """Return when something happened on the wall; None for never."""
        if monotonic == NEVER:
            return None
        return self.wall - timedelta(seconds=self.monotonic - monotonic)

    def monotonic_of(self, wall: datetime) -> float:
        """Return when something happened on the monotonic clock, before this process perhaps."""
        return self.monotonic - (self.wall - wall).total_seconds()
