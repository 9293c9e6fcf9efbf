"""Turns a worker group into a backend and a reducer that connect its members."""

import os
import socket
import time
from typing import Final, Protocol, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Backend
from muster.collectives.errors import PeerRefused
from muster.collectives.operations import all_gather_bytes
from muster.collectives.reduction.arena_reducer import ArenaReducer
from muster.collectives.reduction.message_reducer import MessageReducer
from muster.collectives.reduction.reducer import Reducer
from muster.collectives.transports.arena import Arena, Geometry
from muster.collectives.transports.flags import Flags
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import rendezvous
from muster.collectives.transports.shared_memory import SharedMemoryBackend
from muster.collectives.transports.tcp import TcpBackend
from muster.contracts.environ import RankSettings
from muster.contracts.messages import WorkerGroup
from muster.contracts.spec import GROUP_LIMIT
from muster.training.group_updates import GroupUpdate, GroupUpdates

PEER_TIMEOUT_SECONDS: Final = 30 * 24 * 3600.0
"""Practically unlimited. The coordinator decides which peer is gone, and a newer group ends every
wait."""

LOOPBACK: Final = "127.0.0.1"

ATTACH_POLL_SECONDS: Final = 0.001
"""Between attempts to attach to the memory of a peer that has not initialised it yet."""

Value = TypeVar("Value")


class Group:
    """A backend and a reducer of one worker group. Leaving the context closes the backend."""

    def __init__(self, backend: Backend, reducer: Reducer) -> None:
        self.backend: Final = backend
        self.reducer: Final = reducer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()


class GroupFactory(Protocol):
    """Connects this rank with the other members of a group."""

    @property
    def port(self) -> int:
        """The port on which peers reach this rank; 0 if they do not use one."""

    def create(self, update: GroupUpdate) -> Group | None:
        """Return the group, or None if this rank is not a member.

        Raises `CollectiveError`, and `GroupChanged` or `StopRequested` while it waits for peers.
        """


class TcpGroupFactory:
    """Connects ranks over TCP: each one listens, all call the first member of the group."""

    def __init__(self, rank: int, slots: NDArray[np.float32], updates: GroupUpdates) -> None:
        self._rank: Final = rank
        self._slots: Final = slots
        self._updates: Final = updates
        self._listener: Final = socket.create_server((LOOPBACK, 0))

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def create(self, update: GroupUpdate) -> Group | None:
        group_rank = group_rank_of(self._rank, update.group)
        if group_rank is None:
            return None
        first = update.group.members[0]
        membership = Membership(
            rank=group_rank,
            world_size=len(update.group.members),
            generation=update.group.generation,
            token=update.group.token.encode(),
        )
        connections = rendezvous(
            membership,
            (first.host, first.port),
            # `rendezvous` closes the listener it gets, and the next group needs ours again.
            listener=self._listener.dup(),
            timeout_seconds=PEER_TIMEOUT_SECONDS,
            on_wait=self._updates.check,
        )
        backend = TcpBackend(membership, connections, on_wait=self._updates.check)
        return Group(backend, MessageReducer(backend, self._slots))


class SharedMemoryGroupFactory:
    """Connects the ranks of one host through the memory that comes with each group."""

    port: Final = 0

    def __init__(self, rank: int, geometry: Geometry, updates: GroupUpdates) -> None:
        self._rank: Final = rank
        self._geometry: Final = geometry
        self._updates: Final = updates
        self._own: Arena | None = None
        self._own_file: tuple[int, int] | None = None

    def create(self, update: GroupUpdate) -> Group | None:
        group_rank = group_rank_of(self._rank, update.group)
        if group_rank is None:
            return None
        result, *descriptors = update.memory
        own = self._own_arena(descriptors[group_rank])
        arenas = [
            own if peer == group_rank else self._attach(descriptor)
            for peer, descriptor in enumerate(descriptors)
        ]
        flags = Flags(
            arenas=arenas,
            rank=group_rank,
            generation=update.group.generation,
            # The agent sees deaths, and the coordinator answers them with a newer group.
            on_wait=self._updates.check,
        )
        return Group(SharedMemoryBackend(flags), ArenaReducer(flags, result))

    def _own_arena(self, descriptor: int) -> Arena:
        """Return this rank's arena; a new agent hands out a new one."""
        stat = os.fstat(descriptor)
        file = (stat.st_dev, stat.st_ino)
        if self._own is None or file != self._own_file:
            self._own, self._own_file = Arena.create(descriptor, self._geometry), file
        return self._own

    def _attach(self, descriptor: int) -> Arena:
        """Map a peer's arena. A peer in its first group may still be initialising it."""
        while True:
            try:
                return Arena.attach(descriptor)
            except PeerRefused:
                self._updates.check()
                time.sleep(ATTACH_POLL_SECONDS)


def group_factory(
    settings: RankSettings, leaves: int, elements: int, updates: GroupUpdates
) -> GroupFactory:
    """Return how this rank meets its peers, to sum so many leaves of so many elements."""
    if settings.agent_fd is not None and settings.backend != "tcp":
        geometry = Geometry(slot_count=leaves, elements=elements, max_ranks=GROUP_LIMIT)
        return SharedMemoryGroupFactory(settings.rank, geometry, updates)
    slots = np.zeros((leaves, elements), np.float32)
    return TcpGroupFactory(settings.rank, slots, updates)


def gather_values(backend: Backend, own: Value, kind: type[Value]) -> list[Value]:
    """Return the value that each member passed, in group rank order; all members call this."""
    encoded = msgspec.msgpack.encode(own)
    gathered = all_gather_bytes(backend, encoded, timeout_seconds=PEER_TIMEOUT_SECONDS)
    return [msgspec.msgpack.decode(value, type=kind) for value in gathered]


def group_rank_of(rank: int, worker_group: WorkerGroup) -> int | None:
    """Return the position of a rank in the group, or None if it is not a member."""
    return next(
        (place for place, member in enumerate(worker_group.members) if member.rank == rank), None
    )
