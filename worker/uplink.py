"""The agent's connection to whoever is coordinator now.

It may be away at any time: then nothing is queued, because on every new connection the agent tells
the whole present state again. What is sent in between is news, and only worth sending now.
"""

import errno
import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from muster.contracts.agent import CoordinatorAddress
from muster.contracts.encoding import decode_coordinator_message, encode
from muster.contracts.errors import WireError
from muster.contracts.framing import FrameReader, frame
from muster.contracts.messages import AgentMessage, CoordinatorMessage
from muster.peers import user_of
from muster.published_address import published_address
from muster.sight import require_descriptors
from muster.socket_owners import plain

UNSENT_LIMIT_BYTES: Final = 4 << 20
"""A coordinator that stopped reading is as good as away; the next connection starts afresh."""

READ_BYTES: Final = 1 << 16

FOR_A_CONNECTION: Final = 2
"""Descriptors: its own, and one to look with at whose process answers. Our own coordinator, if it
could not be looked at, would be taken for a stranger's."""

_BOTH: Final = selectors.EVENT_READ | selectors.EVENT_WRITE


Hear = Callable[[CoordinatorMessage], None]


class Uplink:
    """One non-blocking TCP connection, or none, kept in the caller's selector."""

    def __init__(self, address_file: Path, selector: selectors.BaseSelector, hear: Hear) -> None:
        self._address_file = address_file
        self._selector = selector
        self._hear = hear
        self._socket: socket.socket | None = None
        self._address: CoordinatorAddress | None = None
        self._reader = FrameReader()
        self._unsent = bytearray()
        self.is_welcome = False
        """Whether the other end has accepted us; the owner's to set, reset with the connection."""

    @property
    def is_open(self) -> bool:
        """Whether a connection is there or under way."""
        return self._socket is not None

    def connect(self) -> bool:
        """Try once, if there are descriptors; return whether a connection is under way."""
        address = published_address(self._address_file)
        if address is None:
            return False
        try:
            require_descriptors(FOR_A_CONNECTION)
            attempt = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return False
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
    def is_superseded(self) -> bool:
        """Whether the coordinator of today listens elsewhere than where we called last.

        One that was stopped, its machine perhaps, keeps its connections for as long as it likes.
        """
        address = published_address(self._address_file)
        return address is not None and address != self._address

    @property
    def peer_is_ours(self) -> bool:
        """Whether the process at the other end belongs to our own user.

        A coordinator that died has left its port to anybody on this machine.
        """
        if self._socket is None:
            return False
        host, port = self._socket.getsockname()
        peer_host, peer_port = self._socket.getpeername()
        try:
            return user_of((plain(peer_host), peer_port), (plain(host), port)) == os.geteuid()
        except OSError:
            return False  # it cannot be seen now: nothing is said to whoever it may be

    def send(self, message: AgentMessage) -> None:
        """Send now or as soon as it fits; without a connection the message is dropped."""
        if self._socket is None:
            return
        self._unsent += frame(encode(message))
        if len(self._unsent) > UNSENT_LIMIT_BYTES:
            self.drop()
        else:
            self._flush()

    def drop(self) -> None:
        """Close the connection, if any."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
        self._socket = None
        self._unsent.clear()
        self.is_welcome = False

    def _on_ready(self) -> None:
        self._flush()
        self._receive()

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.drop()
            return
        self._selector.modify(
            self._socket, _BOTH if self._unsent else selectors.EVENT_READ, self._on_ready
        )

    def _receive(self) -> None:
        for message in self._read():
            if self.is_open:  # whoever was hung up on is not obeyed, whatever came along
                self._hear(message)

    def _read(self) -> list[CoordinatorMessage]:
        if self._socket is None:
            return []
        try:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError
            return [decode_coordinator_message(payload) for payload in self._reader.feed(data)]
        except BlockingIOError:
            return []
        except (OSError, WireError):
            self.drop()
            return []
