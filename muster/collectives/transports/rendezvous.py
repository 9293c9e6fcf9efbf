"""Connects the ranks of a group through rank 0's address.

Every rank connects to rank 0 and sends its own port; when all have connected, rank 0 sends the
addresses to all, and each rank connects to those of lower rank. Each connection is authenticated
before anything else is read (`handshake`).
"""

import errno
import ipaddress
import math
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import msgspec

from muster.collectives.backend import ON_WAIT_SECONDS, TIMEOUT_SECONDS, OnWait
from muster.collectives.deadline import Deadline
from muster.collectives.errors import (
    InvalidRank,
    PeerRefused,
    PeerUnreachable,
    TransportFailed,
    Unsupported,
)
from muster.collectives.transports.handshake import Membership, answer, call
from muster.collectives.transports.pending_peers import PendingPeers
from muster.collectives.transports.streams import SocketStream, Stream
from muster.contracts.errors import AuthenticationFailed
from muster.host.peers import is_same_user, keep_alive
from muster.links.session import Session

Address: TypeAlias = tuple[str, int]

CONNECT_SECONDS: Final = 1.0
"""Timeout of one connection attempt; attempts repeat until the deadline. `on_wait` is not called
meanwhile."""

_WAYS: Final = {
    errno.EADDRINUSE: "Choose another port",
    errno.EADDRNOTAVAIL: "It is not an address of this machine: correct the list, or the rank",
}


class Endpoint(NamedTuple):
    """Where a rank listens, and the number of its host."""

    host: str
    port: int
    host_number: int


class Connections(NamedTuple):
    """A stream to each other rank, and the host of each."""

    streams: dict[int, Stream]
    hosts: tuple[int, ...]


def rendezvous(
    own: Membership,
    address: Address,
    *,
    endpoints: Sequence[Endpoint] | None = None,
    listener: socket.socket | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    unreachable_seconds: float = math.inf,
    on_wait: OnWait = lambda: None,
) -> Connections:
    """Connect rank `own.rank` with all others, which meet at rank 0's `address`.

    If the `endpoints` of all ranks are known, these connect to each other at once. `listener` is
    this rank's own bound socket; it is closed in any case. Connections between hosts are sealed.

    With `unreachable_seconds`, a rank to which no connection comes about for that long ends the
    rendezvous, and one that refuses ours is called again: it may still be in another group. A rank
    that is connected and does not answer may compute; only `on_wait` ends that wait.

    Raises `InvalidWorldSize`, `InvalidRank`, `PeerRefused` if a rank has another token, generation
    or world size, `Timeout` if not all ranks connect, `PeerUnreachable`, `Unsupported` without a
    token where one is needed, `TransportFailed` for system errors, and what `on_wait` raises.
    """
    with listener or nullcontext():
        if not 0 <= own.rank < own.world_size:
            raise InvalidRank(own.rank, own.world_size)
        deadline = Deadline(timeout_seconds, f"the ranks at {address[0]}:{address[1]}")
        attempt = _Rendezvous(own, deadline, unreachable_seconds, on_wait)
        try:
            return attempt.connect_all(address, endpoints, listener)
        except OSError as error:
            place = endpoints[own.rank] if endpoints else address
            way = _WAYS.get(error.errno or 0, "Check that this host can reach it")
            raise TransportFailed(
                f"the rendezvous at {place[0]}:{place[1]} failed: {error}. {way}"
            ) from error


class _Rendezvous:
    """Connects one rank with all others."""

    def __init__(
        self, own: Membership, deadline: Deadline, unreachable_seconds: float, on_wait: OnWait
    ) -> None:
        self._own = own
        self._deadline = deadline
        self._unreachable_seconds = unreachable_seconds
        self.on_wait = on_wait
        self._connections: dict[int, socket.socket] = {}
        self._sessions: dict[int, Session] = {}

    def connect_all(
        self,
        address: Address,
        endpoints: Sequence[Endpoint] | None,
        listener: socket.socket | None,
    ) -> Connections:
        """Return the streams; after a failure no connection is left open."""
        rank = self._own.rank
        try:
            if endpoints is not None:
                self._set_hosts(endpoints)
                address = endpoints[rank][:2]
            elif rank:
                # Where rank 0 is reached from, the others reach this rank.
                address = (self._connect(0, address).getsockname()[0], 0)
            with listener or _listen(address) as bound:
                if endpoints is None:
                    endpoints = self._register(bound) if rank else self._send_endpoints(bound)
                    self._set_hosts(endpoints)
                for peer in range(rank):
                    if peer not in self._connections:
                        self._call(peer, endpoints[peer][:2])
                if rank + 1 not in self._connections:
                    self._admit(bound)
            streams = {peer: self._stream(peer) for peer in self._connections}
        except BaseException:
            for connection in self._connections.values():
                connection.close()
            raise
        return Connections(streams, self._own.hosts)

    def _set_hosts(self, endpoints: Sequence[Endpoint]) -> None:
        hosts = tuple(endpoint.host_number for endpoint in endpoints)
        self._own = replace(self._own, hosts=hosts)

    def _stream(self, peer: int) -> Stream:
        """Tune a connection, and seal it unless it stays on this host."""
        connection = self._connections[peer]
        _tune(connection)
        cipher = self._sessions[peer].cipher
        if cipher is None:
            return SocketStream(connection, peer)
        if not self._own.token:
            raise Unsupported(
                "ranks of different hosts need a token, the same secret on all ranks: pass token="
            )
        # Here and not above: on one host the ciphers would only cost time and memory.
        from muster.collectives.transports.sealed import SealedStream  # noqa: PLC0415

        return SealedStream(connection, peer, cipher)

    def _admit(self, listener: socket.socket) -> dict[int, int]:
        """Admit the ranks above this one; return their ports."""
        pending = PendingPeers(
            listener, lambda caller: answer(self._own, is_sealed=must_seal(caller))
        )
        above = set(range(self._own.rank + 1, self._own.world_size))
        admitted = pending.admit(above, self._deadline, self.on_wait)
        for caller, peer in admitted.items():
            self._connections[caller.rank] = peer.connection
            self._sessions[caller.rank] = peer.session
        return {caller.rank: caller.port for caller in admitted}

    def _send_endpoints(self, listener: socket.socket) -> list[Endpoint]:
        """Send the table of endpoints to all ranks once they have registered, and return it."""
        endpoints, hosts = [Endpoint("", 0, 0)], [""]
        for rank, port in sorted(self._admit(listener).items()):
            connection = self._connections[rank]
            address = connection.getpeername()[0]
            host = address if must_seal(connection) else ""
            hosts += [host] * (host not in hosts)
            endpoints.append(Endpoint(address, port, hosts.index(host)))
        for rank, connection in self._connections.items():
            session = self._sessions[rank]
            # Sealed between hosts: it decides who sums with whom.
            session.send(msgspec.msgpack.encode(endpoints))
            connection.sendall(session.take())
        return endpoints

    def _register(self, listener: socket.socket) -> list[Endpoint]:
        """Register at rank 0; return the endpoints of all ranks once all have registered."""
        self._handshake(0, listener.getsockname()[1])
        while not (tables := self._receive(0)):
            pass
        try:
            return msgspec.msgpack.decode(tables[0], type=list[Endpoint])
        except msgspec.DecodeError as error:
            raise PeerRefused(f"rank 0 sent no addresses: {error}. Install one Muster") from error

    def _call(self, rank: int, address: Address) -> None:
        """Connect to a rank and run the handshake."""
        while True:
            connection = self._connect(rank, address)
            try:
                self._handshake(rank, 0)
            except (PeerRefused, OSError):
                if self._unreachable_seconds == math.inf:
                    raise
                connection.close()
                time.sleep(ON_WAIT_SECONDS)
            else:
                return

    def _connect(self, rank: int, address: Address) -> socket.socket:
        """Return a connection; retry while the rank does not listen yet."""
        until = time.monotonic() + self._unreachable_seconds
        while True:
            self.on_wait()
            self._deadline.check()
            try:
                limit_seconds = min(CONNECT_SECONDS, self._deadline.left_seconds)
                connection = _connect(address, limit_seconds or CONNECT_SECONDS)
            except OSError as error:
                if time.monotonic() >= until:
                    place = f"{address[0]}:{address[1]}"
                    raise PeerUnreachable(rank, place, str(error)) from error
                is_unknown = isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME
                if is_unknown and until == math.inf:
                    raise  # a name that does not exist, in contrast to a rank that is not up yet
                time.sleep(ON_WAIT_SECONDS)
                continue
            self._connections[rank] = connection
            connection.settimeout(ON_WAIT_SECONDS)
            return connection

    def _handshake(self, rank: int, port: int) -> None:
        """Run the caller's side of the handshake."""
        connection = self._connections[rank]
        session = self._sessions[rank] = call(
            self._own, rank, port, is_sealed=must_seal(connection)
        )
        connection.sendall(session.take())
        while not session.is_open:
            self._receive(rank)
        connection.sendall(session.take())
        # Now, as the kernel knows whose the other end is once it has been accepted.
        if not is_same_user(connection, or_remote=True):
            raise PeerRefused(
                f"a process of another user listens at {connection.getpeername()[:2]}: "
                "choose another port"
            )

    def _receive(self, rank: int) -> list[bytes]:
        """Take in what comes next, of the handshake or behind it; return what it completes."""
        session = self._sessions[rank]
        try:
            return session.receive(self._read(rank, session.frames.missing_bytes))
        except AuthenticationFailed as error:
            raise PeerRefused(f"rank {rank} is refused: {error}") from error

    def _read(self, rank: int, size_bytes: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            self.on_wait()
            self._deadline.check()
            try:
                part = self._connections[rank].recv(size_bytes - len(data))
            except TimeoutError:
                continue
            except ConnectionError:
                part = b""
            if not part:
                raise PeerRefused(
                    f"rank {rank} closed its connection to rank {self._own.rank}: it has another "
                    "token, generation, world size or list of addresses, or it ended; see its log"
                )
            data += part
        return data


def _connect(address: Address, limit_seconds: float) -> socket.socket:
    """Return a tuned connection. Raises OSError, also where the other end has left at once."""
    connection = _open(address, limit_seconds)
    try:
        if connection.getsockname() == connection.getpeername():  # a TCP self-connect
            raise ConnectionRefusedError("no process listens on this ephemeral port")
        _tune(connection)
    except OSError:
        connection.close()
        raise
    return connection


def _open(address: Address, limit_seconds: float) -> socket.socket:
    """Return a connection to the first address of a host that answers. Raises OSError."""
    failure = OSError(f"{address[0]} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(limit_seconds)
            # What it connects from may be the port at which a rank of this host is to listen.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.connect(place)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


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
