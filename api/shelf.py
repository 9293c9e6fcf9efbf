"""The last events of each feed, kept for whoever is a little behind; bounded over all feeds.

Who wants one that is not kept any more reads the files instead: what is kept saves work, and nobody
depends on it. So a feed may lose its events at any time, and those that hold most lose first.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from api.logs.position import Position

KEPT_EVENTS: Final = 64
"""Of one feed: six seconds of a job that writes little, four megabytes of lines of one that writes
much."""

KEPT_BYTES: Final = 64 << 20
"""Of all feeds together, their positions counted: with thousands of ranks those are most of it."""

PLACE_BYTES: Final = 136
"""What a rank's place takes in an event's position, as measured where all ranks have moved."""


@dataclass(frozen=True, slots=True)
class Event:
    """Lines of logs as they go over the wire, and the position behind them."""

    wire: bytes
    position: Position

    @property
    def size_bytes(self) -> int:
        """What it takes to keep, at most."""
        return len(self.wire) + PLACE_BYTES * len(self.position)


class Shelf:
    """Everything that the feeds of one event loop keep."""

    def __init__(self) -> None:
        self._all: set[Kept] = set()
        self._size_bytes = 0

    def kept(self) -> "Kept":
        """Return a place for the events of one more feed."""
        kept = Kept(self)
        self._all.add(kept)
        return kept

    def remove(self, kept: "Kept") -> None:
        """Keep nothing of this feed any more."""
        self._all.discard(kept)

    def count(self, size_bytes: int) -> None:
        """Count bytes that were added or, negative, taken away."""
        self._size_bytes += size_bytes

    def make_room(self) -> None:
        """See that there is not too much: whoever has more than a fair share drops what is over."""
        if self._size_bytes > KEPT_BYTES:
            # Shares of the half, so that this is not done again for each event.
            share = KEPT_BYTES // 2 // len(self._all)
            for kept in self._all:
                kept.shrink(share)


class Kept:
    """The last events of one feed, the oldest first."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._events: deque[Event] = deque()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, place: int) -> Event:
        return self._events[place]

    def append(self, event: Event) -> None:
        if len(self._events) == KEPT_EVENTS:
            self._drop_oldest()
        self._events.append(event)
        self._count(event.size_bytes)
        self._shelf.make_room()

    def shrink(self, size_bytes: int) -> None:
        """Drop the oldest events until no more than this is left."""
        while self.size_bytes > size_bytes:
            self._drop_oldest()

    def close(self) -> None:
        """Keep nothing any more."""
        self.shrink(0)
        self._shelf.remove(self)

    def _drop_oldest(self) -> None:
        self._count(-self._events.popleft().size_bytes)

    def _count(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._shelf.count(size_bytes)
