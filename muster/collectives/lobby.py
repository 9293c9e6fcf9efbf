"""Where callers wait until they have proved who they are.

A stranger may connect and stay silent, send garbage or leave: it costs one descriptor, nobody waits
for it, and when there are too many the one that came first goes.
"""

import contextlib
import select
import socket
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Final

from muster.collectives.backend import ATTENTION_SECONDS, Attention
from muster.collectives.deadline import Deadline
from muster.collectives.errors import PeerRefused
from muster.collectives.handshake import Caller, Steps

STRANGERS_LIMIT: Final = 64


class Guest:
    """A connection, and how far its handshake is."""

    def __init__(self, connection: socket.socket, steps: Steps[Caller]) -> None:
        connection.setblocking(False)  # noqa: FBT003  the standard library's signature
        self.connection = connection
        self._steps = steps
        self._came = b""
        self._wanted_bytes = next(steps).size_bytes

    def go_on(self) -> Caller | None:
        """Take what has come; return who it is once that is proved.

        Raises `PeerRefused` or OSError, and the connection is then to be closed.
        """
        came = self.connection.recv(self._wanted_bytes - len(self._came))
        if not came:
            raise PeerRefused("somebody connected and left")
        self._came += came
        if len(self._came) < self._wanted_bytes:
            return None
        try:
            turn = self._steps.send(self._came)
        except StopIteration as end:
            caller: Caller = end.value
            return caller
        self.connection.send(turn.send)  # less than any buffer that is empty
        self._came, self._wanted_bytes = b"", turn.size_bytes
        return None


class Lobby:
    """Lets the expected ranks in, and nobody else."""

    def __init__(self, listener: socket.socket, answer: Callable[[], Steps[Caller]]) -> None:
        listener.setblocking(False)  # noqa: FBT003  the standard library's signature
        self._listener = listener
        self._answer = answer
        self._guests: dict[int, Guest] = {}

    def admit(
        self, expected: AbstractSet[int], deadline: Deadline, attention: Attention
    ) -> dict[Caller, socket.socket]:
        """Return the connections of all `expected` ranks, each once; everybody else's is closed."""
        admitted: dict[Caller, socket.socket] = {}
        with contextlib.ExitStack() as unless_all_came:
            unless_all_came.callback(lambda: _close(admitted.values()))
            try:
                while missing := expected - {caller.rank for caller in admitted}:
                    attention()
                    deadline.check()
                    admitted |= self._look(missing)
            finally:
                _close(guest.connection for guest in self._guests.values())
            unless_all_came.pop_all()
        return admitted

    def _look(self, missing: AbstractSet[int]) -> dict[Caller, socket.socket]:
        """Go on with one who has something to say; return it if it is one of the missing."""
        poll = select.poll()
        for descriptor in [self._listener.fileno(), *self._guests]:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(ATTENTION_SECONDS * 1000)[:1]:
            if descriptor == self._listener.fileno():
                self._welcome()
            elif caller := self._hear(descriptor):
                connection = self._guests.pop(descriptor).connection
                if caller.rank in missing:
                    return {caller: connection}
                connection.close()
        return {}

    def _welcome(self) -> None:
        with contextlib.suppress(ConnectionError):  # it may have left already
            connection, _ = self._listener.accept()
            self._guests[connection.fileno()] = Guest(connection, self._answer())
        if len(self._guests) > STRANGERS_LIMIT:
            self._turn_out(next(iter(self._guests)))

    def _hear(self, descriptor: int) -> Caller | None:
        try:
            return self._guests[descriptor].go_on()
        except (PeerRefused, OSError):
            self._turn_out(descriptor)
            return None

    def _turn_out(self, descriptor: int) -> None:
        self._guests.pop(descriptor).connection.close()


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()
