"""How the ranks of a group find each other: at rank 0's address.

Every rank calls rank 0 and says at which port it can be called itself; when all are there, rank 0
tells each where the others are, and each calls those of lower rank. Whoever connects proves that it
belongs to the group before anything else is read (`handshake`).
"""

import socket
import struct
import time
from contextlib import ExitStack
from typing import Final, TypeAlias

from muster.collectives.backend import (
    ATTENTION_SECONDS,
    MESSAGE_LIMIT_BYTES,
    TIMEOUT_SECONDS,
    Attention,
)
from muster.collectives.deadline import Deadline
from muster.collectives.errors import InvalidRank, InvalidWorldSize, PeerRefused, TransportFailed
from muster.collectives.handshake import Membership, Steps, answer, call
from muster.collectives.lobby import Lobby
from muster.collectives.tcp import LEAST_WORLD_SIZE, TcpBackend

Address: TypeAlias = tuple[str, int]

CONNECT_SECONDS: Final = 5.0
"""A host that does not answer is tried again after so long, until the time is up."""

KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A host that vanished says nothing: after so many seconds without a word it is asked, and after
three questions more it is gone. Only systems that know these names are told."""

_PLACE: Final = struct.Struct("<46sH")  # the longest numeric address there is, and a port


def meet(
    own: Membership,
    address: Address,
    *,
    listener: socket.socket | None = None,
    limit_bytes: int = MESSAGE_LIMIT_BYTES,
    timeout_seconds: float = TIMEOUT_SECONDS,
    attention: Attention = lambda: None,
) -> TcpBackend:
    """Return the backend of rank `own.rank` once all ranks have come to rank 0's `address`.

    A `listener` is this rank's own, bound already; it is closed in the end, whatever happens.
    Raises `PeerRefused` if another rank knows another token, generation or world size, `TimedOut`
    if not all come, `TransportFailed` if the system is in the way, and whatever `attention` raises.
    """
    with ExitStack() as listeners:
        if listener is not None:
            listeners.enter_context(listener)
        _check(own)
        meeting = _Meeting(own, Deadline(timeout_seconds, f"the ranks at {address}"), attention)
        try:
            connections = meeting.connections(address, listener, listeners)
        except OSError as error:
            raise TransportFailed(
                f"meeting the ranks at {address} failed: {error}. "
                "See whether that address can be reached from here"
            ) from error
    return TcpBackend(
        own.rank,
        own.world_size,
        connections,
        generation=own.generation,
        limit_bytes=limit_bytes,
        attention=attention,
    )


def _check(own: Membership) -> None:
    if own.world_size < LEAST_WORLD_SIZE:
        raise InvalidWorldSize(own.world_size, LEAST_WORLD_SIZE)
    if not 0 <= own.rank < own.world_size:
        raise InvalidRank(own.rank, own.world_size)


class _Meeting:
    """One rank's way to a connection with each other rank."""

    def __init__(self, own: Membership, deadline: Deadline, attention: Attention) -> None:
        self._own = own
        self._deadline = deadline
        self._attention = attention
        self._connections: dict[int, socket.socket] = {}

    def connections(
        self, address: Address, listener: socket.socket | None, listeners: ExitStack
    ) -> dict[int, socket.socket]:
        """Return them by rank; if that fails, none is left open."""
        with ExitStack() as unless_all_came:
            unless_all_came.callback(self._close)
            if self._own.rank == 0:
                listener = listener or listeners.enter_context(_listen(address))
                self._tell(self._admit(listener))
            else:
                first = self._reach(0, address)
                listener = listener or listeners.enter_context(_listen((_host(first), 0)))
                places = self._introduce(first, listener)
                for rank in range(1, self._own.rank):
                    self._drive(rank, self._reach(rank, places[rank]), call(self._own, rank, 0))
                self._admit(listener)
            unless_all_came.pop_all()
        for connection in self._connections.values():
            _tune(connection)
        return self._connections

    def _admit(self, listener: socket.socket) -> dict[int, Address]:
        """Let the ranks above in; return where they can be called."""
        lobby = Lobby(listener, lambda: answer(self._own))
        above = set(range(self._own.rank + 1, self._own.world_size))
        places = {}
        for caller, connection in lobby.admit(above, self._deadline, self._attention).items():
            self._connections[caller.rank] = connection
            places[caller.rank] = (connection.getpeername()[0], caller.port)
        return places

    def _tell(self, places: dict[int, Address]) -> None:
        """As rank 0, tell everybody where everybody is."""
        ordered = [places[rank] for rank in sorted(places)]
        table = b"".join(_PLACE.pack(host.encode(), port) for host, port in [("", 0), *ordered])
        for connection in self._connections.values():
            connection.sendall(table)

    def _introduce(self, first: socket.socket, listener: socket.socket) -> list[Address]:
        """Call rank 0; return what it tells once all have come."""
        self._drive(0, first, call(self._own, 0, listener.getsockname()[1]))
        table = self._read(0, first, _PLACE.size * self._own.world_size)
        return [(host.rstrip(b"\0").decode(), port) for host, port in _PLACE.iter_unpack(table)]

    def _reach(self, rank: int, address: Address) -> socket.socket:
        """Return a connection; a rank that does not listen yet is tried again."""
        while True:
            self._attention()
            self._deadline.check()
            try:
                limit_seconds = min(CONNECT_SECONDS, self._deadline.left_seconds)
                connection = socket.create_connection(address, limit_seconds or CONNECT_SECONDS)
            except OSError:
                time.sleep(ATTENTION_SECONDS)
                continue
            if connection.getsockname() == connection.getpeername():
                connection.close()  # nobody listened, and by chance it has reached itself
                continue
            self._connections[rank] = connection
            connection.settimeout(ATTENTION_SECONDS)
            return connection

    def _drive(self, rank: int, connection: socket.socket, steps: Steps[None]) -> None:
        """Take the caller's turns until the other end has proved itself."""
        turn = next(steps)
        while turn.size_bytes:
            connection.sendall(turn.send)
            turn = steps.send(self._read(rank, connection, turn.size_bytes))
        connection.sendall(turn.send)

    def _read(self, rank: int, connection: socket.socket, size_bytes: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            self._attention()
            self._deadline.check()
            try:
                came = connection.recv(size_bytes - len(data))
            except TimeoutError:
                continue
            except ConnectionError:
                came = b""
            if not came:
                raise PeerRefused(
                    f"rank {rank} hung up on rank {self._own.rank}: it has another token, "
                    "generation or world size, or is gone: its log says which"
                )
            data += came
        return data

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def _tune(connection: socket.socket) -> None:
    """Have small frames sent at once, and a lost host noticed; buffers are the kernel's affair."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(address: Address) -> socket.socket:
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(address, family=family)


def _host(connection: socket.socket) -> str:
    host: str = connection.getsockname()[0]
    return host
