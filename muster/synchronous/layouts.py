"""Where a rank hears who it trains with: the other direction of its channel to the agent.

Nobody calls it: it is asked, between two sums and whenever the rank waits for a peer. Only the
newest layout counts; what it came with is closed when a newer one comes.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from muster.contracts.encoding import decode_layout
from muster.contracts.errors import WireError
from muster.contracts.messages import Layout, Seat
from muster.line import Line

LOOK_SECONDS: Final = 0.1
"""How often a rank that waits for a layout looks whether it is to stop."""


class Regroup(Exception):
    """A newer layout is there: leave the present group."""


class Stopped(Exception):
    """Somebody asked for an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """A layout and the memory that came along: the results', and each member's arena."""

    layout: Layout
    memory: tuple[int, ...] = ()

    def close(self) -> None:
        _close(self.memory)


class Layouts(Protocol):
    """Tells a rank of layouts."""

    def attend(self) -> None:
        """Return if nothing has changed; raise `Regroup` or `Stopped`. Costs a microsecond."""

    def next(self) -> Gathering:
        """Wait for a layout newer than the last one returned, and return it, the caller's to close.

        Raises `Stopped`.
        """


class AnnouncedLayouts:
    """Layouts from an agent. While there is none, the rank goes on with the one it has."""

    def __init__(self, line: Line, should_stop: Callable[[], bool]) -> None:
        self._line = line
        self._should_stop = should_stop
        self._generation = -1
        self._newest: Gathering | None = None

    def attend(self) -> None:
        self._hear()
        if self._should_stop():
            raise Stopped
        if self._newest is not None:
            raise Regroup

    def next(self) -> Gathering:
        while self._newest is None:
            if self._should_stop():
                raise Stopped
            self._line.await_packet(LOOK_SECONDS)
            self._hear()
        newest, self._newest = self._newest, None
        self._generation = newest.layout.generation
        return newest

    def _hear(self) -> None:
        while (packet := self._line.receive()) is not None:
            self._note(*packet)

    def _note(self, content: bytes, memory: Sequence[int]) -> None:
        try:
            heard = Gathering(layout=decode_layout(content), memory=tuple(memory))
        except WireError:
            _close(memory)
            return
        known = self._generation if self._newest is None else self._newest.layout.generation
        if heard.layout.generation <= known:
            heard.close()
            return
        if self._newest is not None:
            self._newest.close()
        self._newest = heard


class Alone:
    """The one layout of a rank that nobody supervises: it trains the whole job by itself."""

    def __init__(self, rank: int, should_stop: Callable[[], bool]) -> None:
        seat = Seat(worker_id=0, rank=rank, host="", port=0)
        self._layout = Layout(generation=0, token="", seats=(seat,), paused=False)
        self._should_stop = should_stop

    def attend(self) -> None:
        if self._should_stop():
            raise Stopped

    def next(self) -> Gathering:
        return Gathering(layout=self._layout)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
