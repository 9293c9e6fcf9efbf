"""Encrypts and authenticates what two ranks of different hosts send each other.

The stream is cut into records: their length (4 bytes, little-endian) and that many bytes of
AES-256-GCM, tag included (`muster.links.sealing`). The length is authenticated. A stream that
ends early has no goodbye, which is sealed too: it counts as a death.
"""

import socket
import struct
from collections.abc import Iterable
from typing import Final

from muster.collectives.errors import PeerRefused
from muster.collectives.transports.streams import SocketStream, beginning_of
from muster.contracts.errors import AuthenticationFailed
from muster.links.frames import TAG_BYTES
from muster.links.sealing import Cipher

RECORD_BYTES: Final = 256 << 10
"""The most of a record before it is sealed."""

_LENGTH: Final = struct.Struct("<I")
_NOTHING: Final = memoryview(b"")


class SealedStream(SocketStream):
    """A connected stream socket whose bytes only the holders of the keys can read or write."""

    def __init__(self, connection: socket.socket, peer: int, cipher: Cipher) -> None:
        super().__init__(connection, peer)
        self._cipher = cipher
        self._unsent = _NOTHING  # sealed
        self._opened = _NOTHING  # not read yet
        self._record = bytearray(_LENGTH.size)
        self._filled = 0

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, parts: Iterable[memoryview]) -> int:
        self._flush()
        if self._unsent:
            return 0
        data = b"".join(beginning_of(parts, RECORD_BYTES))
        if data:
            self._unsent = memoryview(self._record_of(data))
            self._flush()
        # Accepted even if none of it is sent: a record is sealed once, as the receiver counts them.
        return len(data)

    def read_into(self, part: memoryview) -> int:
        while not self._opened:
            count = super().read_into(memoryview(self._record)[self._filled :])
            if count == 0:
                return 0
            self._filled += count
            if self._filled == len(self._record):
                self._filled = 0
                self._complete()
        size = min(part.nbytes, self._opened.nbytes)
        part[:size] = self._opened[:size]
        self._opened = self._opened[size:]
        return size

    def _record_of(self, data: bytes) -> bytes:
        length = _LENGTH.pack(len(data) + TAG_BYTES)
        return length + self._cipher.seal(data, length)

    def _flush(self) -> None:
        if self._unsent:
            self._unsent = self._unsent[super().send([self._unsent]) :]

    def _complete(self) -> None:
        """Use what has been read: a length, or a record."""
        if len(self._record) == _LENGTH.size:
            (length,) = _LENGTH.unpack(self._record)
            # Before memory is taken for the record, which alone proves the length.
            if not TAG_BYTES < length <= RECORD_BYTES + TAG_BYTES:
                raise self._refused()
            self._record = bytearray(length)
            return
        length = _LENGTH.pack(len(self._record))
        try:
            self._opened = memoryview(self._cipher.open(self._record, length))
        except AuthenticationFailed as error:
            raise self._refused() from error
        self._record = bytearray(_LENGTH.size)

    def _refused(self) -> PeerRefused:
        self.close()
        return PeerRefused(
            f"what came from rank {self.peer} was changed on the way or is not from it: "
            "check what is between the hosts"
        )
