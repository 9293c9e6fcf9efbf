"""Payloads on a stream of bytes: an 8-byte little-endian length before each. No socket here."""

import struct
from typing import Final

from muster.contracts.errors import WireError

CONTROL_FRAME_LIMIT_BYTES: Final = 1 << 20
"""Control messages are small (an environment is the largest). A longer prefix comes from a broken
or hostile peer, and is refused before anything of that size is allocated."""

TAG_BYTES: Final = 16
"""By which a payload is longer when it is sealed."""

_LENGTH: Final = struct.Struct("<Q")


def check_size(size_bytes: int) -> None:
    """Raise `WireError` if a frame cannot hold so much."""
    if size_bytes > CONTROL_FRAME_LIMIT_BYTES:
        raise WireError(
            f"a message of {size_bytes} bytes is longer than the limit of "
            f"{CONTROL_FRAME_LIMIT_BYTES}"
        )


def frame(payload: bytes) -> bytes:
    """Return `payload` behind its length; raises `WireError` if it is too long."""
    check_size(len(payload))
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Collects bytes in the order they came and returns whole payloads."""

    def __init__(self, limit_bytes: int = CONTROL_FRAME_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        """Of a payload; may be changed."""
        self._buffer = bytearray()

    @property
    def missing_bytes(self) -> int:
        """How many bytes are missing of the next length, or of the payload behind it."""
        return self._end() - len(self._buffer)

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """Return the payloads that `data` completes.

        Raises `WireError` for a length above the limit; close the connection then.
        """
        self._buffer += data
        payloads = []
        while (end := self._end()) <= len(self._buffer):
            with memoryview(self._buffer) as view:
                payloads.append(bytes(view[_LENGTH.size : end]))
            del self._buffer[:end]
        return payloads

    def _end(self) -> int:
        """Return where the first frame ends, or its length as long as that is not complete."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.limit_bytes:
            raise WireError(
                f"a peer announced a frame of {length} bytes; the limit is {self.limit_bytes}"
            )
        return int(_LENGTH.size + length)
