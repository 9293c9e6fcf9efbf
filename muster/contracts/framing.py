"""Frames: an 8-byte little-endian length, then that many bytes. No socket in sight.

Whoever owns a socket feeds what it read to a `FrameReader` and gets whole payloads back, so every
way in which bytes can be cut or lie is a unit test.
"""

import struct
from typing import Final

from muster.contracts.errors import WireError

CONTROL_FRAME_LIMIT_BYTES: Final = 1 << 20
"""Control messages are small (an environment is the largest); a longer prefix is a broken or
hostile peer, and is refused before anything of that size is allocated."""

_LENGTH: Final = struct.Struct("<Q")


def frame(payload: bytes) -> bytes:
    """Return `payload` behind its length."""
    if len(payload) > CONTROL_FRAME_LIMIT_BYTES:
        raise WireError(
            f"a message of {len(payload)} bytes is longer than the limit of "
            f"{CONTROL_FRAME_LIMIT_BYTES}"
        )
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Collects bytes in the order they came and hands out whole payloads."""

    def __init__(self, limit_bytes: int = CONTROL_FRAME_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes.

        Raises `WireError` for a length above the limit; the connection is then of no more use.
        """
        self._buffer += data
        payloads = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._limit_bytes:
                raise WireError(
                    f"a peer announced a frame of {length} bytes; the limit is {self._limit_bytes}"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return payloads
