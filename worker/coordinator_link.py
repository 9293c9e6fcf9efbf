"""The agent's connection to the current coordinator.

It may be lost at any time. Nothing is queued meanwhile: on every new connection the agent sends its
whole state again.
"""

import errno
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from muster.contracts.errors import WireError
from muster.contracts.messages import AgentMessage, CoordinatorAddress, CoordinatorMessage
from muster.contracts.wire import FrameReader, decode_coordinator_message, encode, frame
from muster.host.files import read_coordinator_address
from muster.host.peers import is_same_user

UNSENT_LIMIT_BYTES: Final = 4 << 20
"""A coordinator that reads nothing for so long is treated as gone."""

_BOTH: Final = selectors.EVENT_READ | selectors.EVENT_WRITE


class CoordinatorLink:
    """At most one non-blocking TCP connection, kept in the caller's selector."""

    def __init__(
        self,
        address_file: Path,
        selector: selectors.BaseSelector,
        on_message: Callable[[CoordinatorMessage], None],
    ) -> None:
        self._address_file = address_file
        self._selector = selector
        self._on_message = on_message
        self._socket: socket.socket | None = None
        self._address: CoordinatorAddress | None = None
        self._reader = FrameReader()
        self._unsent = bytearray()
        self.is_welcome = False
        """Whether the coordinator has accepted us; set by the owner, reset with the connection."""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, or one being established."""
        return self._socket is not None

    def connect(self) -> bool:
        """Try once; return whether a connection is being established."""
        address = read_coordinator_address(self._address_file)
        if address is None:
            return False
        attempt = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        attempt.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if attempt.connect_ex((address.host, address.port)) not in {0, errno.EINPROGRESS}:
            attempt.close()
            return False
        self._socket = attempt
        self._address = address
        self._reader = FrameReader()
        self._selector.register(attempt, _BOTH, self._on_ready)
        return True

    @property
    def has_new_address(self) -> bool:
        """Whether another address is published than the one we connected to last.

        A coordinator that is suspended keeps its connections although another one has taken over.
        """
        address = read_coordinator_address(self._address_file)
        return address is not None and address != self._address

    @property
    def is_same_user(self) -> bool:
        """Whether the peer's process belongs to our user: any user can bind a freed port."""
        return self._socket is not None and is_same_user(self._socket)

    def send(self, message: AgentMessage) -> None:
        """Send now or as soon as there is room; dropped without a connection."""
        if self._socket is None:
            return
        self._unsent += frame(encode(message))
        if len(self._unsent) > UNSENT_LIMIT_BYTES:
            self.close()
        else:
            self._flush()

    def close(self) -> None:
        """Close the connection, if any."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
        self._socket = None
        self._unsent.clear()
        self.is_welcome = False

    def _on_ready(self) -> None:
        self._flush()
        for message in self._receive():
            if self.is_open:  # a handler may close the connection: ignore the rest then
                self._on_message(message)

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        self._selector.modify(
            self._socket, _BOTH if self._unsent else selectors.EVENT_READ, self._on_ready
        )

    def _receive(self) -> list[CoordinatorMessage]:
        if self._socket is None:
            return []
        try:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            return [decode_coordinator_message(payload) for payload in self._reader.feed(data)]
        except BlockingIOError:
            return []
        except (OSError, WireError):
            self.close()
            return []
