"""Turns a worker group into a backend and a reducer that connect its members."""

import errno
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Final, Protocol, Self, TypeVar

import msgspec
import numpy as np

from muster.collectives.backend import Backend
from muster.collectives.errors import PeerRefused, PeerUnreachable, TransportFailed
from muster.collectives.operations import all_gather_bytes
from muster.collectives.reduction.arena_reducer import ArenaReducer
from muster.collectives.reduction.compressed import Compression
from muster.collectives.reduction.host_reducer import ArenaHostReducer, HostReducer
from muster.collectives.reduction.message_reducer import MessageReducer
from muster.collectives.reduction.reducer import Reducer
from muster.collectives.reduction.summation import AdderOf, tree_adder
from muster.collectives.transports.arena import Arena, Geometry
from muster.collectives.transports.flags import Flags
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import Endpoint, rendezvous
from muster.collectives.transports.shared_memory import SharedMemoryBackend
from muster.collectives.transports.tcp import TcpBackend
from muster.contracts.agent import LOOPBACK
from muster.contracts.errors import MusterError
from muster.contracts.job.field_types import GROUP_LIMIT
from muster.contracts.messages.rank import WorkerGroup
from muster.contracts.settings.environ import RankSettings
from muster.contracts.settings.variables import RANK_PORTS
from muster.training.groups.updates import GroupUpdate, GroupUpdates

PEER_TIMEOUT_SECONDS: Final = 30 * 24 * 3600.0
"""Practically unlimited. The coordinator decides which peer is gone, and a newer group ends every
wait."""

UNREACHABLE_SECONDS: Final = 10.0
"""A peer to which no connection comes about for this long is lost. The kernel accepts connections
while a peer computes, so a peer that does not answer them is not."""

ATTACH_POLL_SECONDS: Final = 0.001
"""Between attempts to attach to the memory of a peer that has not initialised it yet."""

NAMES_LIMIT, NAME_LIMIT = 3, 100
"""How many parts of a state a message names, and how many characters of each name."""

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


class WorkersDiverged(MusterError):
    """Some members hold or compute other bits; `members` are their positions in the group."""

    def __init__(self, message: str, members: Sequence[int], rank: int, *entries: str) -> None:
        """`entries` are the names of the parts of the state that differ; the first are kept."""
        super().__init__(message)
        self.members, self.entries = tuple(members), entries[:NAMES_LIMIT]
        self.includes_this_rank = rank in members


class GroupFactory(Protocol):
    """Connects this rank with the other members of a group."""

    @property
    def port(self) -> int:
        """The port on which peers reach this rank; 0 if they do not use one."""

    def create(self, update: GroupUpdate) -> Group | None:
        """Return the group, or None if this rank is not a member.

        Raises `CollectiveError`, and `GroupChanged` or `StopRequested` while it waits for peers.
        """


class SharedMemoryGroupFactory:
    """Connects the ranks of one host through the memory that comes with each group."""

    port: Final = 0

    def __init__(
        self, rank: int, geometry: Geometry, updates: GroupUpdates, adder_of: AdderOf = tree_adder
    ) -> None:
        self._adder_of: Final = adder_of
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
            generation=update.group.round,
            # The agent sees deaths, and the coordinator answers them with a newer group.
            on_wait=self._updates.check,
        )
        return Group(SharedMemoryBackend(flags), ArenaReducer(flags, result, self._adder_of))

    def _own_arena(self, descriptor: int) -> Arena:
        """Return this rank's arena; a new agent hands out a new one."""
        stat = os.fstat(descriptor)
        file = (stat.st_dev, stat.st_ino)
        # Our mapping keeps the file alive, so no later one can have its inode.
        if self._own is None or file != self._own_file:
            self._own, self._own_file = Arena.create(descriptor, self._geometry), file
        return self._own

    def join_host(self, update: GroupUpdate, *, is_alone: bool) -> Flags:
        """Return the flags of this rank in a group over TCP, alone or with those of its host.

        The memory is this rank's own arena, a result, and the arenas of all ranks of the host.
        Ranks of an earlier group that still sum its slots see that this one has left it.
        """
        first, peers = update.memory[0], update.memory[:1] if is_alone else update.memory[2:]
        own, on_wait = self._own_arena(first), self._updates.check
        arenas = [
            own if os.path.sameopenfile(each, first) else self._attach(each) for each in peers
        ]
        place, generation = arenas.index(own), update.group.round
        return Flags(arenas=arenas, rank=place, generation=generation, on_wait=on_wait)

    def _attach(self, descriptor: int) -> Arena:
        """Map a peer's arena. A peer in its first group may still be initialising it."""
        while True:
            try:
                return Arena.attach(descriptor)
            except PeerRefused:
                self._updates.check()
                time.sleep(ATTACH_POLL_SECONDS)


class TcpGroupFactory:
    """Connects ranks over TCP: each one listens, and calls those before it in the group.

    With `shared` a group on one host shares memory. The slots are then those of this rank's arena
    in any case, so the sums it holds stay valid when a group grows to another host or shrinks to
    one.
    """

    def __init__(
        self,
        settings: RankSettings,
        geometry: Geometry,
        updates: GroupUpdates,
        shared: SharedMemoryGroupFactory | None,
        compression: Compression | None = None,
    ) -> None:
        """Raises `TransportFailed` if all ports that the settings allow are taken."""
        self._rank: Final = settings.rank
        self._slots: Final = np.zeros((geometry.slot_count, geometry.elements), np.float32)
        self._updates: Final = updates
        self._shared: Final = shared
        self._compression: Final = compression
        self._adder_of: Final = tree_adder if compression is None else compression.adder_of
        self._is_short: Final = geometry.is_short
        self._listener: Final = _listen(settings)
        # A method of the socket: a finalizer that refers to `self` would keep it alive.
        weakref.finalize(self, self._listener.close)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def create(self, update: GroupUpdate) -> Group | None:
        group_rank = group_rank_of(self._rank, update.group)
        if group_rank is None:
            return None
        members, slots, flags = update.group.members, self._slots, None
        hosts = list(dict.fromkeys(member.host for member in members))
        if self._shared is not None:
            if len(hosts) == 1:
                return self._shared.create(update)
            flags = self._shared.join_host(update, is_alone=self._compression is None)
            slots = flags.own.slots
        endpoints = [
            Endpoint(
                LOOPBACK if member.host == members[group_rank].host else member.address,
                member.port,
                hosts.index(member.host),
            )
            for member in members
        ]
        membership = Membership(
            rank=group_rank,
            world_size=len(members),
            generation=update.group.round,
            token=update.group.token.encode(),
        )
        try:
            connections = rendezvous(
                membership,
                endpoints[0][:2],
                endpoints=endpoints,
                # `rendezvous` closes the listener it gets, and the next group needs ours again.
                listener=self._listener.dup(),
                timeout_seconds=PEER_TIMEOUT_SECONDS,
                unreachable_seconds=UNREACHABLE_SECONDS,
                on_wait=self._updates.check,
            )
        except PeerUnreachable as error:
            peer = members[error.rank]
            place = f"{endpoints[error.rank].host}:{peer.port} on host {peer.host}"
            raise PeerUnreachable(peer.rank, place, error.reason) from error
        backend = TcpBackend(membership, connections, on_wait=self._updates.check)
        if self._compression is None or self._is_short or len(hosts) == 1:
            return Group(backend, MessageReducer(backend, slots, self._adder_of))
        if flags is None:
            return Group(backend, HostReducer(backend, slots, self._compression))
        reducer = ArenaHostReducer(backend, flags, update.memory[1], self._compression)
        return Group(backend, reducer)


def group_factory(
    settings: RankSettings,
    leaves: int,
    elements: int,
    updates: GroupUpdates,
    compression: Compression | None = None,
) -> GroupFactory:
    """Return how this rank meets its peers, to sum so many leaves of so many elements."""
    geometry = Geometry(slot_count=leaves, elements=elements, max_ranks=GROUP_LIMIT)
    if settings.agent_fd is None or settings.backend == "tcp":
        return TcpGroupFactory(settings, geometry, updates, None, compression)
    adder_of = tree_adder if compression is None else compression.adder_of
    shared = SharedMemoryGroupFactory(settings.rank, geometry, updates, adder_of)
    if settings.host_count == 1:
        return shared
    return TcpGroupFactory(settings, geometry, updates, shared, compression)


def _listen(settings: RankSettings) -> socket.socket:
    """Listen for peers: of this host alone, or on all interfaces in the range of the settings."""
    if settings.host_count == 1:
        return socket.create_server((LOOPBACK, 0))
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    ports = settings.rank_ports or range(1)  # port 0 is any free one
    for port in ports:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise TransportFailed(
        f"no port from {ports[0]} to {ports[-1]} is free for this rank: let {RANK_PORTS.name} name "
        "more ports"
    )


def divergent_members(digests: Sequence[str]) -> list[int]:
    """Return the members whose digest differs from the most common one.

    If no digest is more common than the others, the first member's counts.
    """
    counts = Counter(digests)
    right = max(counts, key=lambda digest: (counts[digest], digest == digests[0]))
    return [member for member, digest in enumerate(digests) if digest != right]


def gather_values(backend: Backend, own: Value, kind: type[Value]) -> list[Value]:
    """Return the value that each member passed, in group rank order; all members call this."""
    encoded = msgspec.msgpack.encode(own)
    gathered = all_gather_bytes(backend, encoded, timeout_seconds=PEER_TIMEOUT_SECONDS)
    return [msgspec.msgpack.decode(value, type=kind) for value in gathered]


def different_names(backend: Backend, own: dict[str, bytes], members: list[int]) -> list[str]:
    """Return the names whose values are not the same in these members; all members call this."""
    found = gather_values(backend, own, dict[str, bytes])
    compared = [found[member] for member in members]
    names = dict.fromkeys(chain(*compared))
    different = [
        name[:NAME_LIMIT] for name in names if len({digests.get(name) for digests in compared}) > 1
    ]
    return different or ["the order of values"]


def refuse_other_data(data: Sequence[str], nodes: Sequence[str], rank: int) -> None:
    """Refuse members whose host has other data, as far as its totals tell; "" is not compared."""
    divergent = divergent_members(data) if all(data) else []
    if divergent:
        wrong, right = divergent[0], min({*range(len(data))} - {*divergent})
        raise WorkersDiverged(
            f"the data set on {nodes[wrong]} has {data[wrong]}, that on "
            f"{nodes[right]} {data[right]}: give every host the same shards",
            divergent,
            rank,
        )


def group_rank_of(rank: int, worker_group: WorkerGroup) -> int | None:
    """Return the position of a rank in the group, or None if it is not a member."""
    return next(
        (place for place, member in enumerate(worker_group.members) if member.rank == rank), None
    )
