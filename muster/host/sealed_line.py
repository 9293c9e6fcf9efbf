"""A connection on which every payload is sealed, for a thread that waits for the other end."""

import select
import socket
from contextlib import suppress
from typing import Protocol

from muster.contracts.wire import PREFIX_BYTES, frame, frame_length


class Cipher(Protocol):
    """What `muster.contracts.sealing` makes; imported here it would cost every process."""

    def seal(self, data: bytes | memoryview) -> bytes: ...
    def open(self, sealed: bytes | bytearray) -> bytes: ...


class SealedLine:
    """Sends and receives payloads.

    Its methods raise OSError, `WireError` and `AuthenticationFailed`.
    """

    def __init__(self, channel: socket.socket, cipher: Cipher, limit_bytes: int) -> None:
        """`channel` blocks, and no payload that comes is longer than `limit_bytes`."""
        self._socket = channel
        self._cipher = cipher
        self._limit_bytes = limit_bytes

    def send(self, payload: bytes | memoryview) -> None:
        self._socket.sendall(frame(self._cipher.seal(payload)))

    def receive(self) -> bytes:
        return self._cipher.open(read_frame(self._socket, self._limit_bytes))

    def has_news(self, seconds: float) -> bool:
        """Wait, at most until something has come; return whether it has."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def shut_down(self) -> None:
        """End the connection for a thread that waits on it."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def read_frame(channel: socket.socket, limit_bytes: int) -> bytearray:
    """Return the next payload. Raises OSError, and `WireError` for one above the limit."""
    return _read(channel, frame_length(_read(channel, PREFIX_BYTES), limit_bytes))


def _read(channel: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    left = memoryview(data)
    while left:
        taken = channel.recv_into(left)
        if not taken:
            raise ConnectionResetError("the other end has closed the connection")
        left = left[taken:]
    return data
