"""A link for a thread that waits for the other end."""

import select
import socket
from collections.abc import Callable
from contextlib import suppress

from muster.host.peers import SEND_TIMEOUT_SECONDS, keep_alive
from muster.links.session import Session


class BlockingLink:
    """Sends and receives payloads.

    Its methods raise OSError and `AuthenticationFailed`, `send` also `WireError`.
    """

    def __init__(self, channel: socket.socket, session: Session) -> None:
        """`channel` belongs to the link, which waits without end, or see `on_timeout`."""
        self._socket = channel
        self._session = session

    def open(self) -> None:
        """Prove who this end is, and have the other end do so. Closes the link after an error."""
        try:
            self._write()
            while not self._session.is_open:
                self._session.receive(self._read())
                self._write()
            # The other end may take its time. If it reads nothing for `SEND_TIMEOUT_SECONDS`, the
            # kernel ends the connection, and what was being sent is sent again.
            keep_alive(self._socket, SEND_TIMEOUT_SECONDS)
        except BaseException:
            self.close()
            raise

    def send(self, payload: bytes | memoryview) -> None:
        self._session.send(payload)
        self._write()

    def receive(self) -> bytes:
        while not (payloads := self._session.receive(self._read())):
            pass
        return payloads[0]  # what is read completes one at most

    def has_news(self, seconds: float) -> bool:
        """Wait, at most until something has come; return whether it has."""
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def shut_down(self) -> None:
        """End the connection for a thread that waits on it."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def on_timeout(self, error: TimeoutError) -> None:
        """Called each time the timeout of the socket is over; the link waits on after that."""
        raise error

    def _write(self) -> None:
        left = memoryview(self._session.take())
        while left:
            left = left[self._wait_for(self._socket.send, left) :]

    def _read(self) -> bytearray:
        data = bytearray(self._session.frames.missing_bytes)
        left = memoryview(data)
        while left:
            taken = self._wait_for(self._socket.recv_into, left)
            if not taken:
                raise ConnectionResetError("the other end has closed the connection")
            left = left[taken:]
        return data

    def _wait_for(self, move: Callable[[memoryview], int], part: memoryview) -> int:
        while True:
            try:
                return move(part)
            except TimeoutError as error:
                self.on_timeout(error)
