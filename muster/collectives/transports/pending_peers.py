"""Accepts connections and admits those that prove that they belong to the group.

Other users of this machine are refused before anything is read. Any other stranger that connects
and stays silent, sends garbage or leaves costs one descriptor for at most ten seconds and delays no
other connection. Above a limit the oldest pending connection is closed.
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Final

from muster.collectives.backend import ON_WAIT_SECONDS, OnWait
from muster.collectives.deadline import Deadline
from muster.collectives.errors import PeerRefused, Timeout
from muster.collectives.transports.handshake import Caller, Steps
from muster.host.peers import is_same_user

PENDING_LIMIT: Final = 64  # besides the ranks that are expected, which may come all at once
HELLO_TIMEOUT_SECONDS: Final = 10.0

ACCEPTS_AT_ONCE: Final = 64
"""Accepted before pending connections are read: in a flood both have their turn."""


class PendingPeer:
    """A connection and the state of its handshake."""

    def __init__(self, connection: socket.socket, steps: Steps[Caller]) -> None:
        connection.setblocking(False)  # noqa: FBT003  the standard library's signature
        self.connection = connection
        self._steps = steps
        self._received = b""
        self._wanted_bytes = next(steps).size_bytes
        self.expires_at = time.monotonic() + HELLO_TIMEOUT_SECONDS

    def advance(self) -> Caller | None:
        """Read what has arrived; return the caller once it is authenticated.

        Raises `PeerRefused` or OSError; the connection must then be closed.
        """
        received = self.connection.recv(self._wanted_bytes - len(self._received))
        if not received:
            raise PeerRefused("a client connected and left")
        self._received += received
        if len(self._received) < self._wanted_bytes:
            return None
        try:
            turn = self._steps.send(self._received)
        except StopIteration as end:
            caller: Caller = end.value
            return caller
        self.connection.send(turn.send)  # fits into any empty socket buffer
        self._received, self._wanted_bytes = b"", turn.size_bytes
        return None


class PendingPeers:
    """Admits the expected ranks and refuses all other connections."""

    def __init__(
        self, listener: socket.socket, answer: Callable[[socket.socket], Steps[Caller]]
    ) -> None:
        listener.setblocking(False)  # noqa: FBT003  the standard library's signature
        self._listener = listener
        self._answer = answer
        self._pending: dict[int, PendingPeer] = {}
        self._limit = PENDING_LIMIT
        self._refusal = ""

    def admit(
        self, expected: AbstractSet[int], deadline: Deadline, on_wait: OnWait
    ) -> dict[Caller, socket.socket]:
        """Return one connection for each of the `expected` ranks; all others are closed."""
        self._limit = PENDING_LIMIT + len(expected)
        admitted: dict[Caller, socket.socket] = {}
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(lambda: _close(admitted.values()))
            try:
                while missing := expected - {caller.rank for caller in admitted}:
                    on_wait()
                    self._check(deadline)
                    admitted |= self._serve(missing)
            finally:
                _close(peer.connection for peer in self._pending.values())
            on_failure.pop_all()
        return admitted

    def _check(self, deadline: Deadline) -> None:
        """Raise `Timeout` with the last refusal, which may be why a rank is missing."""
        try:
            deadline.check()
        except Timeout as error:
            why = f" ({self._refusal})" if self._refusal else ""
            raise Timeout(error.seconds, error.waited_for + why) from None

    def _serve(self, missing: AbstractSet[int]) -> dict[Caller, socket.socket]:
        """Serve what is readable; return the connections of missing ranks."""
        poll = select.poll()
        for descriptor in [self._listener.fileno(), *self._pending]:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(ON_WAIT_SECONDS * 1000)}
        admitted: dict[Caller, socket.socket] = {}
        for descriptor in ready - {self._listener.fileno()}:
            if caller := self._read(descriptor):
                connection = self._pending.pop(descriptor).connection
                if caller.rank in missing - {other.rank for other in admitted}:
                    admitted[caller] = connection
                else:
                    connection.close()
        if self._listener.fileno() in ready:
            self._accept()
        now = time.monotonic()
        for descriptor in [it for it, peer in self._pending.items() if peer.expires_at <= now]:
            self._drop(descriptor)
        return admitted

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):  # a client may have left already
                return
            if is_same_user(connection, or_remote=True):
                self._pending[connection.fileno()] = PendingPeer(
                    connection, self._answer(connection)
                )
            else:
                connection.close()
            if len(self._pending) > self._limit:
                self._drop(next(iter(self._pending)))

    def _read(self, descriptor: int) -> Caller | None:
        try:
            return self._pending[descriptor].advance()
        except (PeerRefused, OSError) as error:
            self._refusal = str(error)
            self._drop(descriptor)
            return None

    def _drop(self, descriptor: int) -> None:
        self._pending.pop(descriptor).connection.close()


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()
