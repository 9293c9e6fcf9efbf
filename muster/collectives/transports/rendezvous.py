"""Connects the ranks of a group through rank 0's address.

Every rank connects to rank 0 and sends its own port; when all have connected, rank 0 sends the
addresses to all, and each rank connects to those of lower rank. Each connection is authenticated
before anything else is read (`handshake`).
"""

import errno
import ipaddress
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple, TypeAlias

from muster.collectives.backend import ON_WAIT_SECONDS, TIMEOUT_SECONDS, OnWait
from muster.collectives.deadline import Deadline
from muster.collectives.errors import (
    InvalidRank,
    NoConnection,
    PeerRefused,
    TransportFailed,
    Unsupported,
)
from muster.collectives.transports.handshake import Membership, answer, call
from muster.collectives.transports.pending_peers import PendingPeers
from muster.collectives.transports.streams import SocketStream, Stream
from muster.host.peers import is_same_user, keep_alive

Address: TypeAlias = tuple[str, int]

CONNECT_SECONDS: Final = 5.0
"""Timeout of one connection attempt; attempts repeat until the deadline."""

_PLACE: Final = struct.Struct("<46sHH")  # the longest numeric address, a port, a host's number


class Place(NamedTuple):
    """Where a rank listens, and the number of its host."""

    host: str
    port: int
    host_number: int


class Meeting(NamedTuple):
    """What a rank has once all have met: a stream to each other rank, and the host of each."""

    streams: dict[int, Stream]
    hosts: tuple[int, ...]


def rendezvous(
    own: Membership,
    address: Address,
    *,
    places: Sequence[Place] | None = None,
    listener: socket.socket | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    on_wait: OnWait = lambda: None,
) -> Meeting:
    """Connect rank `own.rank` with all others, which meet at rank 0's `address`.

    If the `places` of all ranks are known, they connect to each other at once. `listener` is this
    rank's own bound socket; it is closed in any case. Connections between hosts are sealed.

    Raises `InvalidWorldSize`, `InvalidRank`, `PeerRefused` if a rank has another token, generation
    or world size, `Timeout` if not all ranks connect, `Unsupported` without a token where one is
    needed, `TransportFailed` for system errors, and what `on_wait` raises.
    """
    with ExitStack() as listeners:
        if listener is not None:
            listeners.enter_context(listener)
        if not 0 <= own.rank < own.world_size:
            raise InvalidRank(own.rank, own.world_size)
        attempt = _Rendezvous(
            own, Deadline(timeout_seconds, f"the ranks at {address[0]}:{address[1]}"), on_wait
        )
        try:
            return attempt.meet(address, places, listener, listeners)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            way = "Choose another port" if is_taken else "Check that this host can reach it"
            raise TransportFailed(
                f"the rendezvous at {address[0]}:{address[1]} failed: {error}. {way}"
            ) from error


class _Rendezvous:
    """Connects one rank with all others."""

    def __init__(self, own: Membership, deadline: Deadline, on_wait: OnWait) -> None:
        self._own = own
        self._deadline = deadline
        self.on_wait = on_wait
        self._connections: dict[int, socket.socket] = {}
        self._transcripts: dict[int, bytes] = {}

    def meet(
        self,
        address: Address,
        places: Sequence[Place] | None,
        listener: socket.socket | None,
        listeners: ExitStack,
    ) -> Meeting:
        """Return the streams; after a failure no connection is left open."""
        with ExitStack() as on_failure:
            on_failure.callback(self._close)
            rank = self._own.rank
            if rank == 0 or places is not None:
                listener = listener or listeners.enter_context(
                    _listen(address if places is None else places[rank][:2])
                )
            if rank == 0 and places is None:
                places = self._send_places(self._admit(listener))
            elif places is None:
                first = self._connect(0, address)
                listener = listener or listeners.enter_context(_listen((first.getsockname()[0], 0)))
                places = self._register(first, listener)
            for peer in range(rank):
                if peer not in self._connections:
                    connection = self._connect(peer, places[peer][:2])
                    self._handshake(peer, connection, 0)
            if rank + 1 < self._own.world_size and rank + 1 not in self._connections:
                self._admit(listener)
            streams = {peer: self._stream(peer) for peer in self._connections}
            on_failure.pop_all()
        return Meeting(streams, tuple(place.host_number for place in places))

    def _stream(self, peer: int) -> Stream:
        """Tune a connection, and seal it unless it stays on this host."""
        connection = self._connections[peer]
        _tune(connection)
        if not must_seal(connection):
            return SocketStream(connection, peer)
        if not self._own.token:
            raise Unsupported(
                "ranks of different hosts need a token, the same secret on all ranks: pass token="
            )
        # Here and not above: on one host the ciphers would only cost time and memory.
        from muster.collectives.transports.sealed import SealedStream  # noqa: PLC0415
        from muster.contracts.sealing import derive_keys  # noqa: PLC0415

        is_caller = peer < self._own.rank
        keys = derive_keys(self._own.token, self._transcripts[peer], is_caller=is_caller)
        return SealedStream(connection, peer, keys)

    def _admit(self, listener: socket.socket | None) -> dict[int, Address]:
        """Admit the ranks above this one; return their addresses."""
        if listener is None:
            raise NoConnection(self._own.rank)
        pending = PendingPeers(
            listener, lambda caller: answer(self._own, is_sealed=must_seal(caller))
        )
        above = set(range(self._own.rank + 1, self._own.world_size))
        addresses = {}
        for caller, connection in pending.admit(above, self._deadline, self.on_wait).items():
            self._connections[caller.rank] = connection
            self._transcripts[caller.rank] = caller.transcript
            addresses[caller.rank] = (connection.getpeername()[0], caller.port)
        return addresses

    def _send_places(self, addresses: dict[int, Address]) -> list[Place]:
        """Send the table of places to all ranks, and return it."""
        here = {connection.getsockname()[0] for connection in self._connections.values()}
        numbers = dict.fromkeys(here, 0)
        places = [Place("", 0, 0)]
        for rank in sorted(addresses):
            host, port = addresses[rank]
            places.append(Place(host, port, numbers.setdefault(host, len(set(numbers.values())))))
        table = b"".join(_PLACE.pack(host.encode(), *numbers) for host, *numbers in places)
        for connection in self._connections.values():
            connection.sendall(table)
        return places

    def _register(self, first: socket.socket, listener: socket.socket) -> list[Place]:
        """Register at rank 0; return the places of all ranks once all have registered."""
        self._handshake(0, first, listener.getsockname()[1])
        table = self._read(0, first, _PLACE.size * self._own.world_size)
        return [
            Place(host.rstrip(b"\0").decode(), port, number)
            for host, port, number in _PLACE.iter_unpack(table)
        ]

    def _connect(self, rank: int, address: Address) -> socket.socket:
        """Return a connection; retry while the rank does not listen yet."""
        while True:
            self.on_wait()
            self._deadline.check()
            try:
                limit_seconds = min(CONNECT_SECONDS, self._deadline.left_seconds)
                connection = socket.create_connection(address, limit_seconds or CONNECT_SECONDS)
            except OSError as error:
                if isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME:
                    raise  # a name that does not exist, in contrast to a rank that is not up yet
                time.sleep(ON_WAIT_SECONDS)
                continue
            if connection.getsockname() == connection.getpeername():
                connection.close()  # a TCP self-connect: no process listened on this ephemeral port
                continue
            self._connections[rank] = connection
            connection.settimeout(ON_WAIT_SECONDS)
            return connection

    def _handshake(self, rank: int, connection: socket.socket, port: int) -> None:
        """Run the caller's side of the handshake."""
        steps = call(self._own, rank, port, is_sealed=must_seal(connection))
        turn = next(steps)
        while turn.size_bytes:
            connection.sendall(turn.send)
            turn = steps.send(self._read(rank, connection, turn.size_bytes))
        connection.sendall(turn.send)
        try:
            next(steps)
        except StopIteration as end:
            self._transcripts[rank] = end.value
        # Now, as the kernel knows whose the other end is once it has been accepted.
        if not is_same_user(connection, or_remote=True):
            raise PeerRefused(
                f"a process of another user listens at {connection.getpeername()[:2]}: "
                "choose another port"
            )

    def _read(self, rank: int, connection: socket.socket, size_bytes: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            self.on_wait()
            self._deadline.check()
            try:
                part = connection.recv(size_bytes - len(data))
            except TimeoutError:
                continue
            except ConnectionError:
                part = b""
            if not part:
                raise PeerRefused(
                    f"rank {rank} closed its connection to rank {self._own.rank}: it has another "
                    "token, generation or world size, or it ended; see its log"
                )
            data += part
        return data

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def must_seal(connection: socket.socket) -> bool:
    """True unless both ends are on this host, by loopback or by an address of its own."""
    own, other = connection.getsockname()[0], connection.getpeername()[0]
    return own != other and not is_loopback(other)


def is_loopback(host: str) -> bool:
    """True if a connection to this numeric address does not leave the host."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _tune(connection: socket.socket) -> None:
    """Send small frames at once, and detect lost hosts."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)


def _listen(address: Address) -> socket.socket:
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(address, family=family)
