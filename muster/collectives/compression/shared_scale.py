"""Sums of int8 that are exact, in any order: groups quantize on one scale and share the range.

For each chunk of 1,024 elements let M be the largest magnitude in any of G groups, L = ⌊127/G⌋ and
s = M/L. A group sends q = ⌊x/s + u⌋, clipped to ±L. The sum of all q is at most G·L ≤ 127, so it
fits into int8, and addition modulo 256 gives it in every order, even where a part of it wraps.

*The dither* u in [0, 1) makes q·s right on average. It is h(seed, step, element) + π(group)/G
modulo 1: one number for an element, at another place for each group, so that the groups' errors
cancel in part (correlated quantization: Suresh et al., 2022). It depends on the element's place in
the whole vector, never on who computes it.

*Chunks without a scale.* Where M is 0, or so small that s is no normal float32 (M below 1.2e-38·L),
every q is 0. Where a group has a NaN or an infinity, the whole chunk comes out as NaN: a gradient
that is not finite must not become a finite one.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from muster.collectives.compression.kind import Vector

CHUNK_ELEMENTS: Final = 1024
"""With one scale; 0.1 % of the bytes that are sent are scales."""

PIECE_ELEMENTS: Final = 16 * CHUNK_ELEMENTS
"""Worked on at a time: operands and temporaries stay in the second-level cache."""

_LIMIT: Final = 127
_ONE: Final = np.uint32(0x3F800000)
"""The bits of 1.0; with 23 random bits below, a number in [1, 2)."""
_WORD: Final = 1 << 32


def levels(groups: int) -> int:
    """Return the greatest magnitude of a quantized number, L."""
    return _LIMIT // groups


def pieces(start: int, stop: int) -> Iterator[slice]:
    """Cut [start, stop) at the multiples of `PIECE_ELEMENTS`, and the rest of a chunk off its end.

    `start` begins a chunk. Each piece is a row of whole chunks, or shorter than one.
    """
    while start < stop:
        end = min(stop, start - start % PIECE_ELEMENTS + PIECE_ELEMENTS)
        end -= (end - start) % CHUNK_ELEMENTS
        end = end if end > start else stop
        yield slice(start, end)
        start = end


def chunks_of(piece: slice) -> slice:
    """Return the numbers of the chunks that a piece consists of."""
    return slice(piece.start // CHUNK_ELEMENTS, -(-piece.stop // CHUNK_ELEMENTS))


def in_chunks(piece: Vector) -> Vector:
    """Return a piece as rows of one chunk each."""
    return piece.reshape(-1, min(piece.size, CHUNK_ELEMENTS))


def maxima_of(rows: Sequence[Vector], piece: slice) -> Vector:
    """Return the largest magnitude in any row, for each chunk of a piece; a NaN stays one."""
    largest, magnitudes = np.zeros((2, piece.stop - piece.start), np.float32)
    for row in rows:
        np.maximum(largest, np.abs(row, out=magnitudes), out=largest)
    maxima: Vector = in_chunks(largest).max(axis=1)
    return maxima


def scales_of(maxima: Vector, groups: int) -> Vector:
    """Return the scale of each chunk: 0 where all numbers become 0, NaN where all become NaN."""
    scales = maxima / np.float32(levels(groups))
    scales[scales < np.finfo(np.float32).tiny] = 0
    scales[~np.isfinite(maxima)] = np.nan
    return scales


def decode(total: NDArray[np.int8], scales: Vector, out: Vector) -> None:
    """Write the sum that `total` stands for."""
    np.copyto(out, total)
    np.multiply(in_chunks(out), scales[:, None], out=in_chunks(out))


class Dither:
    """The random numbers of a sum, as a function of (seed, step, turn, element, group)."""

    def __init__(self, seed: int, groups: int) -> None:
        self._seed: Final = seed
        self._groups: Final = groups
        # A stream of a bit generator never changes between versions of numpy (NEP 19).
        words = np.random.Philox(key=np.array([seed, 1], np.uint64)).random_raw(PIECE_ELEMENTS // 2)
        self._table: Final = words.view(np.uint32)
        # Arrays, as numpy takes three times as long for the lesser of an array and a number.
        self._most: Final = np.full(PIECE_ELEMENTS, 1 + levels(groups), np.float32)
        self._least: Final = 2 - self._most

    def begin(self, step: int, turn: int = 0) -> None:
        """Set the step, and the turn of it, of the sum that follows."""
        self._sum = f"{self._seed} {step} {turn}"
        order = sorted(range(self._groups), key=lambda group: self._hash(-1 - group))
        self._shifts = np.empty(self._groups, np.uint32)
        self._shifts[order] = np.arange(self._groups) * (_WORD // self._groups)

    def bits(self, piece: slice) -> NDArray[np.uint32]:
        """Return the 32 random bits of each element of a piece: a·T[place] + b modulo 2³²."""
        number, place = divmod(piece.start, PIECE_ELEMENTS)
        word = self._hash(number)
        bits = self._table[place : place + piece.stop - piece.start] * np.uint32(word % _WORD | 1)
        bits += np.uint32(word // _WORD)
        return bits

    def chosen(self, piece: slice, ratio: float) -> NDArray[np.bool_]:
        """Return which elements of a piece are kept, each with the probability `ratio`."""
        return self.bits(piece) <= np.uint32(ratio * (_WORD - 1))

    def quantize(
        self, piece: slice, groups: Sequence[int], rows: Sequence[Vector], scales: Vector
    ) -> NDArray[np.int8]:
        """Return the sum of what groups have in a piece, whose chunks have these scales."""
        bits = self.bits(piece)
        divisors = np.where(scales == 0, np.float32(np.inf), scales).repeat(CHUNK_ELEMENTS)
        total, size, random = np.zeros(bits.size, np.int8), bits.size, np.empty_like(bits)
        for group, row in zip(groups, rows, strict=True):
            np.right_shift(np.add(bits, self._shifts[group], out=random), 9, out=random)
            ahead = np.bitwise_or(random, _ONE, out=random).view(np.float32)  # 1 + u
            np.floor(np.add(row / divisors[:size], ahead, out=ahead), out=ahead)  # 1 + q
            # Before the cast, which is undefined for what does not fit.
            np.maximum(ahead, self._least[:size], out=ahead)
            total += np.minimum(ahead, self._most[:size], out=ahead).astype(np.int8)
        total -= np.int8(len(rows))
        return total

    def _hash(self, number: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._sum} {number}".encode())
