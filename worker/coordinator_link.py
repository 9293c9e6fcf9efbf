"""Connections to the current coordinator: the agent's, and sealed ones of processes with threads.

The agent's may be lost at any time. Nothing is queued meanwhile: on every new connection the agent
sends its whole state again.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.contracts.attach import JoinOrder
from muster.contracts.errors import AuthenticationFailed, WireError
from muster.contracts.messages import (
    NONCE_BYTES,
    AgentAssignment,
    AgentMessage,
    CoordinatorAddress,
    CoordinatorMessage,
    KeyRequest,
)
from muster.contracts.token import sha256_of
from muster.contracts.wire import (
    FrameReader,
    decode_coordinator_message,
    decode_key_answer,
    encode,
    frame,
)
from muster.host.files import read_coordinator_address
from muster.host.peers import SEND_TIMEOUT_SECONDS, is_same_user, keep_alive
from muster.host.sealed_line import SealedLine, read_frame
from muster.runtime.stderr_messages import print_stderr

if TYPE_CHECKING:
    from muster.contracts.sealing import Cipher

UNSENT_LIMIT_BYTES: Final = 4 << 20
"""A coordinator that reads nothing for so long is treated as gone."""

RETRY_SECONDS: Final = 0.5
"""At least, between two attempts to connect to fixed addresses."""

_BOTH: Final = selectors.EVENT_READ | selectors.EVENT_WRITE


class CoordinatorLink:
    """At most one non-blocking TCP connection, kept in the caller's selector."""

    def __init__(
        self,
        assignment: AgentAssignment,
        selector: selectors.BaseSelector,
        on_message: Callable[[CoordinatorMessage], None],
    ) -> None:
        self._assignment = assignment
        self._address_file = Path(assignment.address_file)
        self._fixed = cycle(assignment.coordinators)
        self._retry_at = 0.0
        self._selector = selector
        self._on_message = on_message
        self._socket: socket.socket | None = None
        self._address: CoordinatorAddress | None = None
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._problem = ""  # the last one that was printed
        self._request = b""  # for the keys of this connection, until they are known
        self._unsealed: list[bytes] = []  # payloads that wait for the keys
        self._seal: Callable[[bytes], bytes] = bytes
        self._open: Callable[[bytes], bytes] = bytes
        self.is_welcome = False
        """Whether the coordinator has accepted us; set by the owner, reset with the connection."""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, or one being established."""
        return self._socket is not None

    def connect(self) -> bool:
        """Try once; return whether a connection is being established."""
        address = next(self._fixed, None) or read_coordinator_address(self._address_file)
        if address is None:
            return False
        self._retry_at = time.monotonic() + RETRY_SECONDS
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        attempt = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        attempt.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._is_sealed:
            keep_alive(attempt, SEND_TIMEOUT_SECONDS)
        if attempt.connect_ex((address.host, address.port)) not in {0, errno.EINPROGRESS}:
            attempt.close()
            return False
        self._socket = attempt
        self._address = address
        self._reader = FrameReader()
        if self._is_sealed:
            self._request = _key_request(self._assignment)
            self._unsent += frame(self._request)
        self._selector.register(attempt, _BOTH, self._on_ready)
        return True

    @property
    def own_address(self) -> str:
        """The address of our end of the connection, where others on its network reach us."""
        return "" if self._socket is None else str(self._socket.getsockname()[0])

    @property
    def has_new_address(self) -> bool:
        """Whether another address is published than the one we connected to last.

        A coordinator that is suspended keeps its connections although another one has taken over.
        Of fixed addresses, whether the next one may be tried.
        """
        if self._assignment.coordinators:
            return self._socket is None and time.monotonic() >= self._retry_at
        address = read_coordinator_address(self._address_file)
        return address is not None and address != self._address

    @property
    def is_authentic(self) -> bool:
        """Whether the peer has the keys, or its process belongs to our user.

        Any user can bind a freed port.
        """
        return self._socket is not None and (self._is_sealed or is_same_user(self._socket))

    @property
    def _is_sealed(self) -> bool:
        return self._assignment.is_remote

    def send(self, message: AgentMessage) -> None:
        """Send now or as soon as there is room; dropped without a connection."""
        if self._socket is None:
            return
        if self._request:
            self._unsealed.append(encode(message))
        else:
            self._unsent += frame(self._seal(encode(message)))
        if len(self._unsent) + sum(map(len, self._unsealed)) > UNSENT_LIMIT_BYTES:
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
        self._unsealed.clear()
        self._request = b""
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
            payloads = self._reader.feed(data)
            if self._request and payloads:
                self._agree(payloads.pop(0))
            return [decode_coordinator_message(self._open(payload)) for payload in payloads]
        except BlockingIOError:
            return []
        except OSError:
            self.close()
        except (WireError, AuthenticationFailed) as error:
            self.close()
            if (problem := str(error)) != self._problem:  # it comes back with every connection
                self._problem = problem
                print_stderr(f"closed the connection to the coordinator: {problem}")
        return []

    def _agree(self, answer: bytes) -> None:
        """Derive the keys, and seal what waits for them. Raises `WireError`."""
        cipher = _cipher(self._assignment, self._request, answer)
        self._seal, self._open = cipher.seal, cipher.open
        self._request = b""
        self._unsent += b"".join(frame(self._seal(payload)) for payload in self._unsealed)
        self._unsealed.clear()
        self._flush()


def home_line(
    own: AgentAssignment | JoinOrder, address: CoordinatorAddress, limit_bytes: int
) -> SealedLine:
    """Connect, and agree on the keys. No payload that comes is longer than `limit_bytes`.

    Raises OSError, `WireError` and `AuthenticationFailed`.
    """
    channel = socket.create_connection((address.host, address.port), SEND_TIMEOUT_SECONDS)
    try:
        request = _key_request(own)
        channel.sendall(frame(request))
        cipher = _cipher(own, request, bytes(read_frame(channel, limit_bytes)))
        # The coordinator may take its time. If it reads nothing for `SEND_TIMEOUT_SECONDS`, the
        # kernel ends the connection, and what was being sent is sent again.
        channel.settimeout(None)
        keep_alive(channel, SEND_TIMEOUT_SECONDS)
    except BaseException:
        channel.close()
        raise
    return SealedLine(channel, cipher, limit_bytes)


def coordinator_addresses(own: AgentAssignment) -> Iterator[CoordinatorAddress | None]:
    """Yield without end where the coordinator may be; None while nothing is known."""
    yield from cycle(own.coordinators)
    while True:  # a file names one only where none is given
        yield read_coordinator_address(Path(own.address_file))


def _key_request(own: AgentAssignment | JoinOrder) -> bytes:
    """Return a new request for the keys of a connection, encoded."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return encode(
        KeyRequest(job_uid=own.job_uid, host=own.host, generation=own.generation, nonce=nonce)
    )


def _cipher(own: AgentAssignment | JoinOrder, request: bytes, answer: bytes) -> Cipher:
    """Derive the keys of a connection. Raises `WireError`."""
    # Here and not above: on the coordinator's host the ciphers would only cost time and memory.
    from muster.contracts.sealing import agent_cipher  # noqa: PLC0415

    decode_key_answer(answer)
    return agent_cipher(sha256_of(own.token), request, answer, is_agent=True)
