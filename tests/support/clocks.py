"""A clock that a test sets."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Time = TypeVar("Time")


@dataclass
class ManualClock(Generic[Time]):
    """Returns `now` until a test changes it."""

    now: Time

    def __call__(self) -> Time:
        return self.now
