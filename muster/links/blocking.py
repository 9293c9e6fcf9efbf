"""A link for a thread that waits for the other end."""

import select
import socket
from contextlib import suppress

from muster.host.peers import SEND_TIMEOUT_SECONDS, keep_alive
from muster.links.session import Session


class BlockingLink:
    """Sends and receives payloads.

    Its methods raise OSError and `AuthenticationFailed`, `send` also `WireError`.
    """

    def __init__(self, channel: socket.socket, session: Session) -> None:
        """`channel` belongs to the link. It waits without end, or until `open` for so long."""
        self._socket = channel
        self._session = session

    def open(self) -> None:
        """Prove who this end is, and have the other end do so. Closes the link after an error."""
        try:
            self._socket.sendall(self._session.take())
            while not self._session.is_open:
                self._session.receive(self._read())
                self._socket.sendall(self._session.take())
            # The other end may take its time. If it reads nothing for `SEND_TIMEOUT_SECONDS`, the
            # kernel ends the connection, and what was being sent is sent again.
            self._socket.settimeout(None)
            keep_alive(self._socket, SEND_TIMEOUT_SECONDS)
        except BaseException:
            self.close()
            raise

    def send(self, payload: bytes | memoryview) -> None:
        self._session.send(payload)
        self._socket.sendall(self._session.take())

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

    def _read(self) -> bytearray:
        data = bytearray(self._session.frames.missing_bytes)
        left = memoryview(data)
        while left:
            taken = self._socket.recv_into(left)
            if not taken:
                raise ConnectionResetError("the other end has closed the connection")
            left = left[taken:]
        return data
