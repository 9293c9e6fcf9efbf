"""A link for a loop that never waits: non-blocking, in the selector of its owner."""

import errno
import os
import selectors
import socket
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from muster.host.peers import SEND_TIMEOUT_SECONDS, keep_alive
from muster.links.reconnect import LINK_ERRORS
from muster.links.session import Session

UNSENT_LIMIT_BYTES: Final = 4 << 20
"""An end that reads nothing for so long is treated as gone."""

READ_BYTES: Final = 1 << 16

_BOTH: Final = selectors.EVENT_READ | selectors.EVENT_WRITE

Message = TypeVar("Message")


class SelectingLink(Generic[Message]):
    """One connection, until either end closes it. Nothing is sent or handled after that."""

    def __init__(
        self,
        address: tuple[str, int],
        session: Session,
        selector: selectors.BaseSelector,
        decode: Callable[[bytes], Message],
        on_message: Callable[[Message], None],
        on_closed: Callable[[Exception | None], None],
    ) -> None:
        """Begin to connect to a numeric address. Raises OSError.

        `decode` raises `WireError`; `on_closed` gets that, or why the session has ended the link.
        """
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_sealed = session.is_sealed
        if self.is_sealed:
            keep_alive(self.socket, SEND_TIMEOUT_SECONDS)
        code = self.socket.connect_ex(address)
        if code not in {0, errno.EINPROGRESS}:
            self.socket.close()
            raise OSError(code, os.strerror(code))
        self._session = session
        self._selector = selector
        self._decode = decode
        self._on_message = on_message
        self._on_closed = on_closed
        self._unsent = bytearray(session.take())
        self.is_open = True
        """True also while it is being established."""
        selector.register(self.socket, _BOTH, self._on_ready)

    def send(self, payload: bytes) -> None:
        """Send now or as soon as there is room and the other end has proved itself."""
        if not self.is_open:
            return
        self._session.send(payload)
        self._unsent += self._session.take()
        if len(self._unsent) + self._session.waiting_bytes > UNSENT_LIMIT_BYTES:
            self.close()
        else:
            self._flush()

    def close(self, error: Exception | None = None) -> None:
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self.socket)
            self.socket.close()
            self._on_closed(error)

    def _on_ready(self) -> None:
        self._flush()
        if not self.is_open:
            return
        try:
            data = self.socket.recv(READ_BYTES)
            messages = [self._decode(payload) for payload in self._session.receive(data)]
        except BlockingIOError:
            return
        except LINK_ERRORS as error:
            self.close(None if isinstance(error, OSError) else error)
            return
        if not data:
            self.close()
            return
        self._unsent += self._session.take()
        self._flush()
        for message in messages:
            if self.is_open:  # a handler may close the connection: ignore the rest then
                self._on_message(message)

    def _flush(self) -> None:
        if not self.is_open:
            return
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        events = _BOTH if self._unsent else selectors.EVENT_READ
        self._selector.modify(self.socket, events, self._on_ready)
