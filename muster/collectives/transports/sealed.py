"""Encrypts and authenticates what two ranks of different hosts send each other.

The stream is cut into records: their length (4 bytes, little-endian) and that many bytes of
AES-256-GCM, tag included. The nonce is the record's number and the length is authenticated, so a
record that is forged, changed, replayed, left out or out of order does not open. A stream that
ends early has no goodbye, which is sealed too: it counts as a death.
"""

import hashlib
import socket
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from muster.collectives.errors import PeerRefused
from muster.collectives.transports.streams import SocketStream, beginning_of

RECORD_BYTES: Final = 256 << 10
"""The most of a record before it is sealed."""

_TAG_BYTES: Final = 16
_KEY_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<I")
_NOTHING: Final = memoryview(b"")


class Keys(NamedTuple):
    """One key for each direction of one connection."""

    sending: bytes
    receiving: bytes


def derive_keys(token: bytes, transcript: bytes, *, is_caller: bool) -> Keys:
    """Return the keys of a connection by HKDF (RFC 5869) from the group's token.

    `transcript` is what both said in their handshake; it has a nonce of each, so keys never repeat.
    """
    salt = hashlib.sha256(transcript).digest()
    derived = HKDF(SHA256(), 2 * _KEY_BYTES, salt, b"muster frames").derive(token)
    of_caller, of_answerer = derived[:_KEY_BYTES], derived[_KEY_BYTES:]
    return Keys(of_caller, of_answerer) if is_caller else Keys(of_answerer, of_caller)


class SealedStream(SocketStream):
    """A connected stream socket whose bytes only the holders of the keys can read or write."""

    def __init__(self, connection: socket.socket, peer: int, keys: Keys) -> None:
        super().__init__(connection, peer)
        self._seal = AESGCM(keys.sending)
        self._open = AESGCM(keys.receiving)
        self._sealed_count = self._opened_count = 0
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
        length = _LENGTH.pack(len(data) + _TAG_BYTES)
        # A counter is a safe nonce, as each direction of each connection has a key of its own.
        sealed = self._seal.encrypt(_nonce(self._sealed_count), data, length)
        self._sealed_count += 1
        return length + sealed

    def _flush(self) -> None:
        if self._unsent:
            self._unsent = self._unsent[super().send([self._unsent]) :]

    def _complete(self) -> None:
        """Use what has been read: a length, or a record."""
        if len(self._record) == _LENGTH.size:
            (length,) = _LENGTH.unpack(self._record)
            if not _TAG_BYTES < length <= RECORD_BYTES + _TAG_BYTES:
                raise self._refused()
            self._record = bytearray(length)
            return
        length = _LENGTH.pack(len(self._record))
        try:
            opened = self._open.decrypt(_nonce(self._opened_count), self._record, length)
        except InvalidTag as error:
            raise self._refused() from error
        self._opened_count += 1
        self._opened = memoryview(opened)
        self._record = bytearray(_LENGTH.size)

    def _refused(self) -> PeerRefused:
        self.close()
        return PeerRefused(
            f"what came from rank {self.peer} was changed on the way or is not from it: "
            "check what is between the hosts"
        )


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
