"""A clock that a test moves by hand."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Time = TypeVar("Time")


@dataclass
class Hand(Generic[Time]):
    """Stands still until `now` is said to be something else."""

    now: Time

    def __call__(self) -> Time:
        return self.now
