"""The rendezvous of ranks of one host: they exchange their memory through a Unix socket.

Every rank sends rank 0 a memfd, its arena, and a pidfd of itself; rank 0 sends all of them to all.
A pidfd tells of a death at once, also if children of the rank live on and hold its files.
"""

import array
import errno
import io
import os
import socket
import struct
import threading
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
    Unsupported,
)
from muster.collectives.transports.arena import Arena, Geometry, refuse_other_machines
from muster.host.peers import peer_of

_HELLO: Final = struct.Struct("<8sII")  # magic, world size, rank
_MAGIC: Final = b"mstmeet\x01"
LARGEST_GROUP: Final = 64
"""One message takes 253 descriptors, two for each rank."""

_PAIR: Final = 2  # a memfd and a pidfd of each rank


class SharedArenas(NamedTuple):
    """What the ranks of one host share, in rank order."""

    arenas: list[Arena]
    watches: dict[int, io.FileIO]
    """A pidfd of each other rank; the caller closes them."""


def exchange_memory(path: Path, rank: int, world_size: int, deadline: Deadline) -> SharedArenas:
    """Return the memory of all ranks once all have met at `path`, where rank 0 listens.

    Processes of other users are refused. Raises `InvalidRank`, `PeerRefused`, `BackendUnavailable`,
    `Timeout` and `TransportFailed`.
    """
    refuse_other_machines()
    if world_size > LARGEST_GROUP:
        raise Unsupported(f"at most {LARGEST_GROUP} ranks share memory, not {world_size}: use TCP")
    if not 0 <= rank < world_size:
        raise InvalidRank(rank, world_size)
    if not hasattr(os, "pidfd_open"):
        raise BackendUnavailable("shared memory without an agent needs Linux 5.3: use TCP")
    geometry = Geometry(slot_count=1, elements=1, max_ranks=world_size)
    with ExitStack() as descriptors:
        memory = _owned(descriptors, os.memfd_create("arena"))
        own = Arena.create(memory, geometry)
        pair = [memory, _owned(descriptors, os.pidfd_open(os.getpid()))]
        try:
            if rank == 0:
                pairs = _collect(path, world_size, pair, deadline, descriptors)
            else:
                pairs = _register(path, rank, world_size, pair, deadline, descriptors)
        except OSError as error:
            raise TransportFailed(
                f"the ranks could not meet at {path}: {error}. Check that path"
            ) from error
        peers = [peer for peer in range(world_size) if peer != rank]
        # The stack closes all descriptors: a mapping needs none, and of pidfds we keep duplicates.
        arenas = {peer: Arena.attach(pairs[_PAIR * peer]) for peer in peers} | {rank: own}
        watches = {peer: io.FileIO(os.dup(pairs[_PAIR * peer + 1])) for peer in peers}
        return SharedArenas([arenas[peer] for peer in range(world_size)], watches)


def _collect(
    path: Path, world_size: int, own: list[int], deadline: Deadline, descriptors: ExitStack
) -> list[int]:
    """Return the descriptors of all ranks, and send them to all."""
    pairs = {0: own}
    with ExitStack() as connections:
        # Packets: the descriptors of a rank stay with its hello, and a closed end reads as empty.
        listener = connections.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        file = _publish(listener, path, world_size)
        connections.callback(lambda: _remove(path, file))
        members: list[socket.socket] = []
        while len(pairs) < world_size:
            connection = connections.enter_context(_accept(listener, deadline))
            data, pair = _receive(connection, _PAIR, deadline, descriptors)
            if not data:
                continue  # that process has ended; another one may take its place
            rank = _rank_of(data, world_size)
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


def _publish(listener: socket.socket, path: Path, world_size: int) -> int:
    """Listen at `path`; return the socket's inode. A living socket and other files stay there."""
    # Under another name until it listens and is private: nothing that is found there is half made.
    hidden = path.with_name(f".{path.name}.{threading.get_native_id()}")
    listener.bind(str(hidden))
    try:
        hidden.chmod(0o600)
        listener.listen(world_size)
        try:
            os.link(hidden, path)
        except FileExistsError:
            _check_abandoned(path)
            path.unlink()
            os.link(hidden, path)
        return path.stat().st_ino
    finally:
        hidden.unlink()


def _check_abandoned(path: Path) -> None:
    """Raise unless `path` is the socket of a group that has ended."""
    if not path.is_socket():
        raise FileExistsError(errno.EEXIST, "a file is in the way", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        try:
            other.connect(str(path))
        except ConnectionRefusedError:
            return
    raise PeerRefused(f"another rank 0 waits at {path}: give each group a path of its own")


def _remove(path: Path, file: int) -> None:
    with suppress(FileNotFoundError):
        if path.stat().st_ino == file:  # else it is that of a later group
            path.unlink()


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


def _rank_of(data: bytes, world_size: int) -> int:
    rank: int
    magic, size, rank = _HELLO.unpack(data) if len(data) == _HELLO.size else (b"", 0, 0)
    if magic != _MAGIC or size != world_size or not 0 < rank < world_size:
        raise PeerRefused(
            f"a process said that it is rank {rank} of {size}, this group has {world_size} ranks: "
            "start all ranks with the same world size and version"
        )
    return rank


def _register(
    path: Path,
    rank: int,
    world_size: int,
    own: list[int],
    deadline: Deadline,
    descriptors: ExitStack,
) -> list[int]:
    """Send rank 0 what is ours; return the descriptors of all ranks."""
    with _connect(path, deadline) as connection:
        if peer_of(connection).user_id != os.getuid():
            raise PeerRefused(f"a process of another user listens at {path}: choose another path")
        _send(connection, _HELLO.pack(_MAGIC, world_size, rank), own)
        data, pairs = _receive(connection, _PAIR * world_size, deadline, descriptors)
    if len(data) != _HELLO.size or len(pairs) != _PAIR * world_size:
        raise PeerRefused(
            f"rank 0 left the rendezvous at {path}: it has another world size, or it ended; see "
            "its output"
        )
    return pairs


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


def _receive(
    connection: socket.socket, count: int, deadline: Deadline, owner: ExitStack
) -> tuple[bytes, list[int]]:
    connection.settimeout(max(deadline.left_seconds, ON_WAIT_SECONDS))
    try:
        # The flags do not matter: callers refuse a list of descriptors that was cut short.
        data, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, count)
    except TimeoutError:
        deadline.check()
        raise Timeout(deadline.seconds, "an answer of the group") from None
    for descriptor in descriptors:
        _owned(owner, descriptor)
    return data, descriptors


def _owned(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor
