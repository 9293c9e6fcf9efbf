"""What is said between the database that leads, its copies, and those who wait for these.

One framed stream: an 8-byte length before each message. A follower says where its copy is and gets
the rows from there on, or a whole image and then says again where it is. A waiter names a row.
"""

from typing import Any, Final, TypeAlias

import msgspec
from msgspec.msgpack import Decoder, encode

from muster.links.frames import FrameReader

LIMIT_BYTES: Final = 64 << 20
CHUNK_BYTES: Final = 1 << 18


class Row(msgspec.Struct, frozen=True, tag=True):
    """A row of the outbox: what one transaction did."""

    number: int
    epoch: int
    has_majority: bool
    statements: bytes
    """msgpack: a list of (SQL, bound values, whether these are of several executions)."""


class Follow(msgspec.Struct, frozen=True, tag=True):
    """The copy of a follower, up to its newest row."""

    image: str
    number: int
    epoch: int
    """Of that row: two rows of one number and epoch are the same, and so are all before them."""


class Acknowledge(msgspec.Struct, frozen=True, tag=True):
    """Every row up to this one is on the follower's disk."""

    number: int


class Wait(msgspec.Struct, frozen=True, tag=True):
    """A question: do enough followers have this row?"""

    number: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    is_acknowledged: bool


class Image(msgspec.Struct, frozen=True, tag=True):
    """A database file follows, in chunks."""

    size_bytes: int
    sha256: str


class Chunk(msgspec.Struct, frozen=True, tag=True):
    content: bytes


class Current(msgspec.Struct, frozen=True, tag=True):
    """The follower has every row that there is."""


ToLeader: TypeAlias = Follow | Acknowledge | Wait
ToOthers: TypeAlias = Row | Image | Chunk | Current | Answer


def pack(message: ToLeader | ToOthers) -> bytes:
    """Return a message with its length before it."""
    payload = encode(message)
    return len(payload).to_bytes(8, "little") + payload


class Unpacker:
    """Returns the messages in a stream of bytes."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401  a union
        self._frames = FrameReader(LIMIT_BYTES)
        self._decoder = Decoder(kind)

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that `data` completes; raises `WireError` and `MsgspecError`."""
        return [self._decoder.decode(payload) for payload in self._frames.feed(data)]
