"""Where the times in rows come from. They are for people; no decision compares two machines'."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeAlias

Clock: TypeAlias = Callable[[], datetime]
"""Returns the time as an aware value in UTC."""


def utc_now() -> datetime:
    """Return the system's time."""
    return datetime.now(UTC)
