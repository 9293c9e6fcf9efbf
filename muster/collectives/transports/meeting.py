"""Ranks of one host meet at a Unix socket and exchange their memory, without an agent.

Every rank sends rank 0 a memfd, its arena, and a pidfd of itself; rank 0 sends all of them to all.
A pidfd tells of a death at once, also if children of the rank live on and hold its files.
"""

import array
import os
import socket
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

from muster.collectives.backend import ON_WAIT_SECONDS
from muster.collectives.deadline import Deadline
from muster.collectives.errors import (
    BackendUnavailable,
    InvalidRank,
    PeerRefused,
    Timeout,
    TransportFailed,
)
from muster.collectives.transports.arena import Arena, Geometry, refuse_other_machines
from muster.host.peers import peer_of

_HELLO: Final = struct.Struct("<8sII")  # magic, world size, rank
_MAGIC: Final = b"mstmeet\x01"
_PAIR: Final = 2  # a memfd and a pidfd of each rank


class Shared(NamedTuple):
    """What the ranks of one host share, in rank order."""

    arenas: list[Arena]
    watches: dict[int, int]
    """A pidfd of each other rank; the caller closes them."""


def meet(path: Path, rank: int, world_size: int, deadline: Deadline) -> Shared:
    """Return the memory of all ranks once all have met at `path`, where rank 0 listens.

    Processes of other users are refused. Raises `InvalidRank`, `PeerRefused`, `BackendUnavailable`,
    `Timeout` and `TransportFailed`.
    """
    refuse_other_machines()
    if not 0 <= rank < world_size:
        raise InvalidRank(rank, world_size)
    if not hasattr(os, "pidfd_open"):
        raise BackendUnavailable("shared memory without an agent needs Linux 5.3: use TCP")
    geometry = Geometry(slot_count=1, elements=1, places=world_size)
    with ExitStack() as descriptors:
        memory = _owned(descriptors, os.memfd_create("arena"))
        own = Arena.create(memory, geometry)
        pair = [memory, _owned(descriptors, os.pidfd_open(os.getpid()))]
        try:
            if rank == 0:
                pairs = _collect(path, world_size, pair, deadline, descriptors)
            else:
                pairs = _register(path, rank, world_size, pair, deadline)
                for descriptor in pairs:
                    _owned(descriptors, descriptor)
        except OSError as error:
            raise TransportFailed(
                f"the ranks could not meet at {path}: {error}. Check that path"
            ) from error
        peers = [peer for peer in range(world_size) if peer != rank]
        arenas = {peer: Arena.attach(pairs[_PAIR * peer]) for peer in peers} | {rank: own}
        watches = {peer: os.dup(pairs[_PAIR * peer + 1]) for peer in peers}
        return Shared([arenas[peer] for peer in range(world_size)], watches)


def _collect(
    path: Path, world_size: int, own: list[int], deadline: Deadline, descriptors: ExitStack
) -> list[int]:
    """Return the descriptors of all ranks, and send them to all."""
    pairs = {0: own}
    with ExitStack() as connections:
        listener = connections.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with suppress(FileNotFoundError):
            path.unlink()  # of a group that has ended
        listener.bind(str(path))
        connections.callback(path.unlink, missing_ok=True)
        path.chmod(0o600)
        listener.listen(world_size)
        members: list[socket.socket] = []
        while len(pairs) < world_size:
            connection = connections.enter_context(_accept(listener, deadline))
            rank, pair = _greeting(connection, world_size, deadline)
            for descriptor in pair:
                _owned(descriptors, descriptor)
            if rank in pairs or len(pair) != _PAIR:
                raise PeerRefused(
                    f"rank {rank} came twice to {path}: give every rank a number of its own"
                )
            pairs[rank] = pair
            members.append(connection)
        ordered = [descriptor for rank in range(world_size) for descriptor in pairs[rank]]
        for connection in members:
            _send(connection, _HELLO.pack(_MAGIC, world_size, 0), ordered)
    return ordered


def _accept(listener: socket.socket, deadline: Deadline) -> socket.socket:
    """Return the next connection of a process of this user."""
    while True:
        deadline.check()
        listener.settimeout(ON_WAIT_SECONDS)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if peer_of(connection).user_id == os.getuid():
            return connection
        connection.close()


def _greeting(
    connection: socket.socket, world_size: int, deadline: Deadline
) -> tuple[int, list[int]]:
    data, descriptors = _receive(connection, _PAIR, deadline)
    magic, size, rank = _HELLO.unpack(data) if len(data) == _HELLO.size else (b"", 0, 0)
    if magic != _MAGIC or size != world_size or not 0 < rank < world_size:
        raise PeerRefused(
            f"a process said that it is rank {rank} of {size}, this group has {world_size} ranks: "
            "start all ranks with the same world size and version"
        )
    return rank, descriptors


def _register(
    path: Path, rank: int, world_size: int, own: list[int], deadline: Deadline
) -> list[int]:
    """Send rank 0 what is ours; return the descriptors of all ranks."""
    with _connect(path, deadline) as connection:
        if peer_of(connection).user_id != os.getuid():
            raise PeerRefused(f"a process of another user listens at {path}: choose another path")
        _send(connection, _HELLO.pack(_MAGIC, world_size, rank), own)
        data, descriptors = _receive(connection, _PAIR * world_size, deadline)
    if len(data) != _HELLO.size or len(descriptors) != _PAIR * world_size:
        raise PeerRefused(
            f"rank 0 left the meeting at {path}: it has another world size, or it ended; see its "
            "output"
        )
    return descriptors


def _connect(path: Path, deadline: Deadline) -> socket.socket:
    """Return a connection; retry while rank 0 does not listen yet."""
    while True:
        deadline.check()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            time.sleep(ON_WAIT_SECONDS)
            continue
        return connection


def _send(connection: socket.socket, data: bytes, descriptors: list[int]) -> None:
    rights = array.array("i", descriptors)
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def _receive(connection: socket.socket, count: int, deadline: Deadline) -> tuple[bytes, list[int]]:
    connection.settimeout(max(deadline.left_seconds, ON_WAIT_SECONDS))
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, count)
    except TimeoutError:
        deadline.check()
        raise Timeout(0, "an answer of the group") from None
    return data, descriptors


def _owned(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor
