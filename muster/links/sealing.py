"""Encrypts and authenticates the messages of two processes that share a secret. No I/O here.

Both ends derive one key for each direction from the secret and all that was said. The nonce of a
message is its number, so a message that is forged, changed, replayed, left out or out of order does
not open. Imported only where a connection leaves its host: `cryptography` costs time and memory.
"""

import hashlib
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from muster.contracts.errors import AuthenticationFailed

_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12


class Keys(NamedTuple):
    """One key for each direction of one connection."""

    sending: bytes
    receiving: bytes


def derive_keys(secret: bytes, transcript: bytes, *, is_caller: bool) -> Keys:
    """Return the keys of a connection by HKDF (RFC 5869) from what both ends know.

    `transcript` is what both said in clear; it has a nonce of each, so keys never repeat.
    """
    salt = hashlib.sha256(transcript).digest()
    derived = HKDF(SHA256(), 2 * _KEY_BYTES, salt, b"muster frames").derive(secret)
    of_caller, of_answerer = derived[:_KEY_BYTES], derived[_KEY_BYTES:]
    return Keys(of_caller, of_answerer) if is_caller else Keys(of_answerer, of_caller)


class Cipher:
    """Seals what one end of a connection sends (AES-256-GCM) and opens what it receives."""

    def __init__(self, keys: Keys) -> None:
        self._sending = AESGCM(keys.sending)
        self._receiving = AESGCM(keys.receiving)
        self._sealed_count = self._opened_count = 0

    def seal(self, data: bytes | memoryview, header: bytes = b"") -> bytes:
        """Return the next message, sealed; `header` goes before it in clear, and may not change."""
        # A counter is a safe nonce, as each direction of each connection has a key of its own.
        sealed = self._sending.encrypt(_nonce(self._sealed_count), data, header)
        self._sealed_count += 1
        return sealed

    def open(self, sealed: bytes | bytearray, header: bytes = b"") -> bytes:
        """Return the next message of the other end. Raises `AuthenticationFailed`."""
        try:
            data = self._receiving.decrypt(_nonce(self._opened_count), sealed, header)
        except InvalidTag as error:
            raise AuthenticationFailed(
                "a message was changed, repeated or lost on the way, or is not from its sender: "
                "check what is between the hosts"
            ) from error
        self._opened_count += 1
        return data


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "little")
