"""From a layout to a group: the same members, able to exchange."""

import os
import socket
import time
from types import TracebackType
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from muster.collectives.arena import Arena, Geometry
from muster.collectives.arena_reducer import ArenaReducer
from muster.collectives.backend import Backend, Reducer
from muster.collectives.errors import PeerRefused
from muster.collectives.flags import Flags
from muster.collectives.handshake import Membership
from muster.collectives.message_reducer import MessageReducer
from muster.collectives.rendezvous import meet
from muster.collectives.shared_memory import SharedMemoryBackend
from muster.collectives.simulated import SimulatedGroup
from muster.contracts.messages import Layout
from muster.synchronous.gathering import PEER_PATIENCE_SECONDS
from muster.synchronous.layouts import Gathering, Layouts

LOOPBACK: Final = "127.0.0.1"

ATTACH_PAUSE_SECONDS: Final = 0.001
"""Between looks at the memory of a peer that has not laid it out yet."""


class Group:
    """A backend and a reducer of one layout; left by closing, which the others see."""

    def __init__(self, backend: Backend, reducer: Reducer) -> None:
        self.backend: Final = backend
        self.reducer: Final = reducer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.backend.close()


class Meeting(Protocol):
    """Makes a group of a layout."""

    @property
    def port(self) -> int:
        """Where this rank is called by its peers; 0 where nobody calls it."""

    def enter(self, gathering: Gathering) -> Group | None:
        """Return the group, or None if this rank is not a member.

        Raises `CollectiveError`, and `Regroup` or `Stopped` while it waits for the others.
        """


class TcpMeeting:
    """Meets ranks wherever they are: each listens all the time, all call the first of a layout."""

    def __init__(self, rank: int, slots: NDArray[np.float32], layouts: Layouts) -> None:
        self._rank: Final = rank
        self._slots: Final = slots
        self._layouts: Final = layouts
        self._listener: Final = socket.create_server((LOOPBACK, 0))

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def enter(self, gathering: Gathering) -> Group | None:
        layout = gathering.layout
        place = place_of(self._rank, layout)
        if place is None:
            return None
        backend = self._backend(layout, place)
        return Group(backend, MessageReducer(backend, self._slots))

    def _backend(self, layout: Layout, place: int) -> Backend:
        first = layout.seats[0]
        if len(layout.seats) == 1:
            return alone()
        membership = Membership(
            rank=place,
            world_size=len(layout.seats),
            generation=layout.generation,
            token=layout.token.encode(),
        )
        return meet(
            membership,
            (first.host, first.port),
            # A meeting closes what it listened with; the next layout needs it again.
            listener=self._listener.dup(),
            timeout_seconds=PEER_PATIENCE_SECONDS,
            attention=self._layouts.attend,
        )


class LonelyMeeting:
    """Meets nobody: for a rank that trains by itself."""

    port: Final = 0

    def __init__(self, slots: NDArray[np.float32]) -> None:
        self._slots: Final = slots

    def enter(self, _gathering: Gathering) -> Group | None:
        backend = alone()
        return Group(backend, MessageReducer(backend, self._slots))


class SharedMemoryMeeting:
    """Meets the ranks of one host in the memory that comes with each layout."""

    port: Final = 0

    def __init__(self, rank: int, geometry: Geometry, layouts: Layouts) -> None:
        self._rank: Final = rank
        self._geometry: Final = geometry
        self._layouts: Final = layouts
        self._own: Arena | None = None
        self._own_file: tuple[int, int] | None = None

    def enter(self, gathering: Gathering) -> Group | None:
        place = place_of(self._rank, gathering.layout)
        if place is None:
            return None
        result, *descriptors = gathering.memory
        own = self._own_arena(descriptors[place])
        arenas = [
            own if peer == place else self._attach(descriptor)
            for peer, descriptor in enumerate(descriptors)
        ]
        flags = Flags(
            arenas=arenas,
            rank=place,
            generation=gathering.layout.generation,
            # Who has died is the agent's to see and the coordinator's to say: by a newer layout.
            pidfds={},
            attention=self._layouts.attend,
        )
        return Group(SharedMemoryBackend(flags), ArenaReducer(flags, result))

    def _own_arena(self, descriptor: int) -> Arena:
        """Return this rank's arena; an agent that takes over from another gives it a new one."""
        stat = os.fstat(descriptor)
        file = (stat.st_dev, stat.st_ino)
        if self._own is None or file != self._own_file:
            self._own, self._own_file = Arena.create(descriptor, self._geometry), file
        return self._own

    def _attach(self, descriptor: int) -> Arena:
        """Map a peer's arena; a peer that hears of its first layout lays it out just now."""
        while True:
            try:
                return Arena.attach(descriptor)
            except PeerRefused:
                self._layouts.attend()
                time.sleep(ATTACH_PAUSE_SECONDS)


def alone() -> Backend:
    """Return the backend of a group of one."""
    (backend,) = SimulatedGroup(1).backends()
    return backend


def place_of(rank: int, layout: Layout) -> int | None:
    """Return the place of a rank in the group, None for who is not a member."""
    return next((place for place, seat in enumerate(layout.seats) if seat.rank == rank), None)
