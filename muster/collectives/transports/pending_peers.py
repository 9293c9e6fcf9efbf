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
from muster.collectives.transports.handshake import CallingRank, caller_of
from muster.contracts.errors import AuthenticationFailed
from muster.host.peers import is_same_user
from muster.links.session import Session

PENDING_LIMIT: Final = 64  # besides the ranks that are expected, which may come all at once
HELLO_TIMEOUT_SECONDS: Final = 10.0

ACCEPTS_AT_ONCE: Final = 64
"""Accepted before pending connections are read: in a flood both have their turn."""


class PendingPeer:
    """A connection and the state of its handshake."""

    def __init__(self, connection: socket.socket, session: Session) -> None:
        connection.setblocking(False)  # noqa: FBT003  the standard library's signature
        self.connection = connection
        self.session = session
        self.expires_at = time.monotonic() + HELLO_TIMEOUT_SECONDS

    def advance(self) -> CallingRank | None:
        """Read what has arrived; return the caller once it is authenticated.

        Raises `PeerRefused`, `AuthenticationFailed` or OSError; the connection must then be closed.
        """
        # No more: what follows the handshake belongs to the stream.
        received = self.connection.recv(self.session.frames.missing_bytes)
        if not received:
            raise PeerRefused("a client connected and left")
        try:
            self.session.receive(received)
        finally:
            self.connection.send(self.session.take())  # fits into any empty socket buffer
        return caller_of(self.session) if self.session.is_open else None


class PendingPeers:
    """Admits the expected ranks and refuses all other connections."""

    def __init__(self, listener: socket.socket, answer: Callable[[socket.socket], Session]) -> None:
        listener.setblocking(False)  # noqa: FBT003  the standard library's signature
        self._listener = listener
        self._answer = answer
        self._pending: dict[int, PendingPeer] = {}
        self._limit = PENDING_LIMIT
        self._refusal = ""

    def admit(
        self, expected: AbstractSet[int], deadline: Deadline, on_wait: OnWait
    ) -> dict[CallingRank, PendingPeer]:
        """Return one connection for each of the `expected` ranks; all others are closed."""
        self._limit = PENDING_LIMIT + len(expected)
        admitted: dict[CallingRank, PendingPeer] = {}
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(lambda: _close(admitted.values()))
            try:
                while missing := expected - {caller.rank for caller in admitted}:
                    on_wait()
                    self._check(deadline)
                    admitted |= self._serve(missing)
            finally:
                _close(self._pending.values())
            on_failure.pop_all()
        return admitted

    def _check(self, deadline: Deadline) -> None:
        """Raise `Timeout` with the last refusal, which may be why a rank is missing."""
        try:
            deadline.check()
        except Timeout as error:
            why = f" ({self._refusal})" if self._refusal else ""
            raise Timeout(error.seconds, error.waited_for + why) from None

    def _serve(self, missing: AbstractSet[int]) -> dict[CallingRank, PendingPeer]:
        """Serve what is readable; return the connections of missing ranks."""
        poll = select.poll()
        for descriptor in [self._listener.fileno(), *self._pending]:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(ON_WAIT_SECONDS * 1000)}
        admitted: dict[CallingRank, PendingPeer] = {}
        for descriptor in ready - {self._listener.fileno()}:
            if caller := self._read(descriptor):
                peer = self._pending.pop(descriptor)
                if caller.rank in missing - {other.rank for other in admitted}:
                    admitted[caller] = peer
                else:
                    peer.connection.close()
        if self._listener.fileno() in ready:
            self._accept()
        now = time.monotonic()
        for descriptor in [key for key, peer in self._pending.items() if peer.expires_at <= now]:
            self._drop(descriptor)
        return admitted

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):  # a client may have left already
                return
            # `_answer` asks for both addresses, and a client that has left has none.
            with contextlib.suppress(OSError):
                if is_same_user(connection, or_remote=True):
                    self._pending[connection.fileno()] = PendingPeer(
                        connection, self._answer(connection)
                    )
            if connection.fileno() not in self._pending:
                connection.close()
            if len(self._pending) > self._limit:
                self._drop(next(iter(self._pending)))

    def _read(self, descriptor: int) -> CallingRank | None:
        try:
            return self._pending[descriptor].advance()
        except (PeerRefused, AuthenticationFailed, OSError) as error:
            self._refusal = str(error)
            self._drop(descriptor)
            return None

    def _drop(self, descriptor: int) -> None:
        self._pending.pop(descriptor).connection.close()


def _close(peers: Iterable[PendingPeer]) -> None:
    for peer in peers:
        peer.connection.close()
