"""The interface of a way to send a gradient in fewer bytes, and the frame of its messages."""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import DTypeLike, NDArray
from xxhash import xxh3_64_intdigest

from muster.collectives.backend import Data
from muster.collectives.errors import PeerRefused, Unsupported

Vector: TypeAlias = NDArray[np.float32]
Message: TypeAlias = NDArray[np.uint8]
Layout: TypeAlias = Sequence[tuple[DTypeLike, int]]

PIECE_ELEMENTS: Final = 65_536
"""256 KB: pieces stay in the second-level cache from pass to pass, and calls of numpy are few."""

VERSION: Final = 1

_HEADER: Final = struct.Struct("<HIIHQ")
"""Version, kind, number of elements, whether all are finite, a digest."""


class Kind(ABC):
    """A way to send float32 in fewer bytes. `repr` is the same for equal options.

    Decoding what was encoded gives the same numbers on every machine, except for PowerSGD, whose
    products are those of the machine's BLAS. If one element of an array is NaN or infinite, all are
    NaN afterwards, so that no number is added that a part of the array did not mean. A message that
    was cut or changed, or is of another version, kind or length, is a `PeerRefused`; then nothing
    was added, and no memory was taken for what it said. Numbers are little-endian.

    An object may keep a state from one array to the next, so each array needs its own. What it
    decodes depends on the message alone.
    """

    rounds_sums: ClassVar[bool] = False
    """True if a sum may be encoded again: ranks then exchange parts of their arrays, and the bytes
    that one sends do not grow with the number of ranks."""

    def encode(self, array: Vector) -> Message:
        """Return a message for `array`, contiguous and of any shape."""
        # Dense kinds look at each piece themselves, while it is in the cache.
        is_finite = not array.size or isinstance(self, Dense) or bool(np.isfinite(array).all())
        message = np.zeros(_HEADER.size, np.uint8)
        if array.size and is_finite:
            with np.errstate(all="ignore"):  # a sum that overflows is a result like any other
                message = self.encode_body(array, _HEADER.size)
            is_finite = message.size > _HEADER.size
        digest = xxh3_64_intdigest(message[_HEADER.size :].data, is_finite)
        _HEADER.pack_into(message.data, 0, *self._facts(array), is_finite, digest)
        return message

    def add(self, data: Data | Message, out: Vector, factor: float = 1) -> None:
        """Add what a message says, times `factor`, to `out`, contiguous, of the array's shape."""
        message = np.frombuffer(data, np.uint8)
        if message.size < _HEADER.size:
            raise PeerRefused(f"a compressed gradient ends after {message.size} bytes: send it all")
        *facts, is_finite, digest = _HEADER.unpack_from(message.data)
        body, expected = message[_HEADER.size :], self._facts(out)
        if facts != expected:
            raise PeerRefused(
                f"a compressed gradient is of (version, kind, elements) {facts}, not {expected}: "
                "use the same release, compression and model on all ranks"
            )
        if is_finite > 1 or digest != xxh3_64_intdigest(body.data, is_finite):
            raise PeerRefused("a compressed gradient was changed on the way: check the network")
        if not is_finite:
            out += np.float32(np.nan)
        elif out.size:
            with np.errstate(all="ignore"):
                self.add_body(body, out, factor)

    def decode(self, data: Data | Message, out: Vector) -> None:
        """Write what a message says into `out`, contiguous and of the array's shape."""
        out[...] = 0
        self.add(data, out)

    def _facts(self, array: Vector) -> list[int]:
        return [VERSION, crc32(repr(self).encode()), array.size]

    @abstractmethod
    def encode_body(self, array: Vector, room: int = 0) -> Message:
        """Return a body of finite elements, at least one, after `room` bytes for a header."""

    @abstractmethod
    def add_body(self, body: Message, out: Vector, factor: float) -> None:
        """Add what a body says, times `factor`. Its bytes may be anything."""


class Dense(Kind):
    """A kind that has a code for each element, and encodes each piece by itself."""

    layout: Layout
    """Of each part of a body: its type, and how many elements one item is for."""

    @abstractmethod
    def encode_piece(self, piece: Vector, *codes: NDArray[Any]) -> None:
        """Write the codes of a piece, whose items begin with it."""

    @abstractmethod
    def decode_piece(self, out: Vector, *codes: NDArray[Any]) -> None:
        """Write what the codes of a piece say."""

    def encode_body(self, array: Vector, room: int = 0) -> Message:
        """Return nothing but the room if an element is not finite."""
        parts = self._parts(array)
        message = np.empty(
            room + sum(np.dtype(dtype).itemsize * count for dtype, count in parts), np.uint8
        )
        codes = split(message[room:], *parts)
        for piece, *code in pieces_of(array.reshape(-1), *codes, layout=self.layout):
            if not np.isfinite(piece).all():
                return message[:room]
            self.encode_piece(piece, *code)
        return message

    def add_body(self, body: Message, out: Vector, factor: float) -> None:
        parts = split(body, *self._parts(out))
        numbers, scale = np.empty(PIECE_ELEMENTS, np.float32), np.float32(factor)
        for target, *codes in pieces_of(out.reshape(-1), *parts, layout=self.layout):
            number = numbers[: target.size]
            self.decode_piece(number, *codes)
            np.add(target, number if factor == 1 else np.multiply(number, scale, number), target)

    def _parts(self, array: Vector) -> list[tuple[DTypeLike, int]]:
        return [(dtype, -(-array.size // per)) for dtype, per in self.layout]


@dataclass
class Float32(Dense):
    """All elements as they are: what other kinds are compared to."""

    rounds_sums = True
    layout = ((np.float32, 1),)

    def encode_piece(self, piece: Vector, *codes: NDArray[Any]) -> None:
        np.copyto(codes[0], piece)

    def decode_piece(self, out: Vector, *codes: NDArray[Any]) -> None:
        np.copyto(out, codes[0])


def joined(room: int, *parts: NDArray[Any]) -> Message:
    """Return the bytes of all parts after `room` others."""
    return np.concatenate(
        [np.zeros(room, np.uint8), *(part.reshape(-1).view(np.uint8) for part in parts)]
    )


def split(body: Message, *parts: tuple[DTypeLike, int]) -> list[NDArray[Any]]:
    """Return the parts of a body, each of a type and a number of elements; checks its length."""
    stops = np.cumsum([0, *(np.dtype(dtype).itemsize * count for dtype, count in parts)])
    if stops[-1] != body.size:
        raise PeerRefused(f"a compressed gradient has {body.size} bytes, not {stops[-1]}")
    pieces = np.split(body, stops[1:-1])
    return [piece.view(dtype) for piece, (dtype, _) in zip(pieces, parts, strict=True)]


def pieces_of(
    flat: NDArray[Any], *parts: NDArray[Any], layout: Layout = ((np.float32, 1),)
) -> Iterator[list[NDArray[Any]]]:
    """Yield the same piece of `flat` and of each part, one after another."""
    steps = [PIECE_ELEMENTS, *(PIECE_ELEMENTS // per for _, per in layout)]
    for number in range(-(-flat.size // PIECE_ELEMENTS)):
        both = zip((flat, *parts), steps, strict=False)
        yield [part[number * step : (number + 1) * step] for part, step in both]


@dataclass
class Sparse(Kind):
    """A kind that sends max(1, ⌊n · ratio⌋) elements."""

    ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:  # nor NaN
            raise Unsupported(f"a ratio of {self.ratio} is not above 0 and at most 1: use 0.01")

    def kept_of(self, elements: int) -> int:
        return max(1, int(elements * self.ratio))
