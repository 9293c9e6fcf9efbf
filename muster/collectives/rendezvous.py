"""Connects the ranks of a group through rank 0's address.

Every rank connects to rank 0 and sends its own port; when all have connected, rank 0 sends the
addresses to all, and each rank connects to those of lower rank. Each connection is authenticated
before anything else is read (`handshake`).
"""

import socket
import struct
import time
from contextlib import ExitStack
from typing import Final, TypeAlias

from muster.collectives.backend import (
    MESSAGE_LIMIT_BYTES,
    ON_WAIT_SECONDS,
    TIMEOUT_SECONDS,
    OnWait,
)
from muster.collectives.deadline import Deadline
from muster.collectives.errors import PeerRefused, TransportFailed
from muster.collectives.handshake import Membership, Steps, answer, call
from muster.collectives.pending_peers import PendingPeers
from muster.collectives.tcp import TcpBackend

Address: TypeAlias = tuple[str, int]

CONNECT_SECONDS: Final = 5.0
"""Timeout of one connection attempt; attempts repeat until the deadline."""

KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Detects a host that vanished: probes after 5 idle seconds, every 2 s, and gives up after three.
Options that the system does not have are skipped."""

_PLACE: Final = struct.Struct("<46sH")  # the longest numeric address, and a port


def rendezvous(
    own: Membership,
    address: Address,
    *,
    listener: socket.socket | None = None,
    limit_bytes: int = MESSAGE_LIMIT_BYTES,
    timeout_seconds: float = TIMEOUT_SECONDS,
    on_wait: OnWait = lambda: None,
) -> TcpBackend:
    """Return the backend of rank `own.rank` once all ranks have connected to rank 0's `address`.

    `listener` is this rank's own bound socket; it is closed in any case. Raises `PeerRefused` if a
    rank has another token, generation or world size, `TimedOut` if not all ranks connect,
    `TransportFailed` for system errors, and what `on_wait` raises.
    """
    with ExitStack() as listeners:
        if listener is not None:
            listeners.enter_context(listener)
        attempt = _Rendezvous(own, Deadline(timeout_seconds, f"the ranks at {address}"), on_wait)
        try:
            connections = attempt.connections(address, listener, listeners)
        except OSError as error:
            raise TransportFailed(
                f"the rendezvous at {address} failed: {error}. "
                "Check that this host can reach that address"
            ) from error
    return TcpBackend(
        own.rank,
        own.world_size,
        connections,
        generation=own.generation,
        limit_bytes=limit_bytes,
        on_wait=on_wait,
    )


class _Rendezvous:
    """Connects one rank with all others."""

    def __init__(self, own: Membership, deadline: Deadline, on_wait: OnWait) -> None:
        self._own = own
        self._deadline = deadline
        self.on_wait = on_wait
        self._connections: dict[int, socket.socket] = {}

    def connections(
        self, address: Address, listener: socket.socket | None, listeners: ExitStack
    ) -> dict[int, socket.socket]:
        """Return the connections by rank; after a failure none is left open."""
        with ExitStack() as on_failure:
            on_failure.callback(self._close)
            if self._own.rank == 0:
                listener = listener or listeners.enter_context(_listen(address))
                self._send_addresses(self._admit(listener))
            else:
                first = self._connect(0, address)
                listener = listener or listeners.enter_context(_listen((first.getsockname()[0], 0)))
                places = self._register(first, listener)
                for rank in range(1, self._own.rank):
                    self._handshake(
                        rank, self._connect(rank, places[rank]), call(self._own, rank, 0)
                    )
                self._admit(listener)
            on_failure.pop_all()
        for connection in self._connections.values():
            _tune(connection)
        return self._connections

    def _admit(self, listener: socket.socket) -> dict[int, Address]:
        """Admit the ranks above this one; return their addresses."""
        pending = PendingPeers(listener, lambda: answer(self._own))
        above = set(range(self._own.rank + 1, self._own.world_size))
        places = {}
        for caller, connection in pending.admit(above, self._deadline, self.on_wait).items():
            self._connections[caller.rank] = connection
            places[caller.rank] = (connection.getpeername()[0], caller.port)
        return places

    def _send_addresses(self, places: dict[int, Address]) -> None:
        """Send the table of addresses to all ranks."""
        ordered = [places[rank] for rank in sorted(places)]
        table = b"".join(_PLACE.pack(host.encode(), port) for host, port in [("", 0), *ordered])
        for connection in self._connections.values():
            connection.sendall(table)

    def _register(self, first: socket.socket, listener: socket.socket) -> list[Address]:
        """Register at rank 0; return the addresses of all ranks once all have registered."""
        self._handshake(0, first, call(self._own, 0, listener.getsockname()[1]))
        table = self._read(0, first, _PLACE.size * self._own.world_size)
        return [(host.rstrip(b"\0").decode(), port) for host, port in _PLACE.iter_unpack(table)]

    def _connect(self, rank: int, address: Address) -> socket.socket:
        """Return a connection; retry while the rank does not listen yet."""
        while True:
            self.on_wait()
            self._deadline.check()
            try:
                limit_seconds = min(CONNECT_SECONDS, self._deadline.left_seconds)
                connection = socket.create_connection(address, limit_seconds or CONNECT_SECONDS)
            except OSError:
                time.sleep(ON_WAIT_SECONDS)
                continue
            if connection.getsockname() == connection.getpeername():
                connection.close()  # a TCP self-connect: no process listened on this ephemeral port
                continue
            self._connections[rank] = connection
            connection.settimeout(ON_WAIT_SECONDS)
            return connection

    def _handshake(self, rank: int, connection: socket.socket, steps: Steps[None]) -> None:
        """Run the caller's side of the handshake."""
        turn = next(steps)
        while turn.size_bytes:
            connection.sendall(turn.send)
            turn = steps.send(self._read(rank, connection, turn.size_bytes))
        connection.sendall(turn.send)

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


def _tune(connection: socket.socket) -> None:
    """Send small frames at once, and detect lost hosts."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(address: Address) -> socket.socket:
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(address, family=family)
