"""Groups of ranks in this process, over every transport.

A further transport is one more function, and one more line in `TRANSPORTS`.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from muster.collectives.backend import Backend, OnWait
from muster.collectives.errors import ChannelClosed
from muster.collectives.simulated import SimulatedBackend
from muster.collectives.subgroups import HybridBackend, SubBackend
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import Connections
from muster.collectives.transports.shared_memory import SharedMemoryBackend
from muster.collectives.transports.streams import SocketStream
from muster.collectives.transports.tcp import TcpBackend
from tests.support.arenas import Host, nothing

LIMIT_BYTES: Final = 1 << 20
# So little that a message of that limit never goes through in one piece. What a socket receives is
# left to the kernel: loopback's packets are as large, and the kernel drops what does not fit.
SEND_BUFFER_BYTES: Final = 64 << 10
GENERATION: Final = 3
RING_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All ends of one group, and how to let a rank die as a killed process does."""

    backends: list[Backend]
    kill: Callable[[int], None]


@contextmanager
def simulated(world_size: int) -> Iterator[Group]:
    backends = SimulatedBackend.create_group(world_size, limit_bytes=LIMIT_BYTES)
    yield Group(backends=list(backends), kill=lambda rank: backends[rank].kill())


@contextmanager
def tcp(world_size: int, on_wait: OnWait = nothing) -> Iterator[Group]:
    ends = connected(world_size)
    backends: list[Backend] = [
        TcpBackend(
            member(rank, world_size), connections_of(own), limit_bytes=LIMIT_BYTES, on_wait=on_wait
        )
        for rank, own in enumerate(ends)
    ]

    def kill(rank: int) -> None:
        for connection in ends[rank].values():
            connection.shutdown(socket.SHUT_RDWR)

    try:
        yield Group(backends=backends, kill=kill)
    finally:
        for backend in backends:
            backend.close()


@contextmanager
def shared_memory(world_size: int, on_wait: OnWait = nothing) -> Iterator[Group]:
    """In production a newer group ends the waits for a rank that has died, through `on_wait`."""
    host = Host(world_size, ring_bytes=RING_BYTES)
    dead: list[int] = []

    def check() -> None:
        on_wait()
        if dead:
            raise ChannelClosed(dead[0])

    backends: list[Backend] = [
        SharedMemoryBackend(
            host.flags(rank, generation=GENERATION, on_wait=check), limit_bytes=LIMIT_BYTES
        )
        for rank in range(world_size)
    ]
    yield Group(backends=backends, kill=dead.append)


TRANSPORTS: Final[Mapping[str, Callable[[int], AbstractContextManager[Group]]]] = {
    "simulated": simulated,
    "tcp": tcp,
    "shared_memory": shared_memory,
}


@contextmanager
def sub_group(world_size: int) -> Iterator[Group]:
    """A view in shared memory, of all ranks but the first and the last."""
    with shared_memory(world_size + 2) as group:
        members = range(1, world_size + 1)
        views: list[Backend] = [SubBackend(group.backends[rank], members) for rank in members]
        yield Group(backends=views, kill=lambda rank: group.kill(members[rank]))


@contextmanager
def sub_sub_group(world_size: int) -> Iterator[Group]:
    """A view of a view, over sockets."""
    with tcp(world_size + 2) as group:
        outer = [SubBackend(backend, range(world_size + 1)) for backend in group.backends[:-1]]
        members = range(1, world_size + 1)
        views: list[Backend] = [SubBackend(outer[rank], members) for rank in members]
        yield Group(backends=views, kill=lambda rank: group.kill(members[rank]))


@contextmanager
def hybrid(world_size: int) -> Iterator[Group]:
    with simulated(world_size) as messages, shared_memory(world_size) as group:
        pairs = zip(messages.backends, group.backends, strict=True)
        yield Group(backends=[HybridBackend(*pair) for pair in pairs], kill=group.kill)


BACKENDS: Final[Mapping[str, Callable[[int], AbstractContextManager[Group]]]] = {
    **TRANSPORTS,
    "sub_group": sub_group,
    "sub_sub_group": sub_sub_group,
    "hybrid": hybrid,
}
"""The transports, and what is made of them."""


def member(rank: int, world_size: int) -> Membership:
    return Membership(rank=rank, world_size=world_size, generation=GENERATION, token=b"")


def connections_of(ends: Mapping[int, socket.socket]) -> Connections:
    return Connections({peer: SocketStream(end, peer) for peer, end in ends.items()}, ())


def connected(world_size: int) -> list[dict[int, socket.socket]]:
    """Return, for each rank, its sockets by peer, each connected with that peer's."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for low, high in combinations(range(world_size), 2):
            ends[high][low] = socket.create_connection(listener.getsockname())
            ends[low][high], _ = listener.accept()
            for end in (ends[high][low], ends[low][high]):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return ends
