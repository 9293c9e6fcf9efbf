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
from typing import Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float32]

CHUNK_ELEMENTS: Final = 1024
"""With one scale; 0.1 % of the bytes that are sent are scales."""

PIECE_ELEMENTS: Final = 16 * CHUNK_ELEMENTS
"""Worked on at a time: operands and temporaries stay in the second-level cache."""

_LIMIT: Final = 127
GROUPS_LIMIT: Final = 64
"""More groups would leave no level but 0."""

_ONE: Final = np.uint32(0x3F800000)
"""The bits of 1.0; with 23 random bits below, a number in [1, 2)."""


def levels(groups: int) -> int:
    """Return the greatest magnitude of a quantized number, L."""
    return _LIMIT // groups


def pieces(start: int, stop: int) -> Iterator[slice]:
    """Cut [start, stop) at the multiples of `PIECE_ELEMENTS`, and the rest of a chunk off its end.

    `start` begins a chunk. Each piece is a row of whole chunks, or shorter than one.
    """
    while start < stop:
        end = min(stop, start - start % PIECE_ELEMENTS + PIECE_ELEMENTS)
        whole = end - (end - start) % CHUNK_ELEMENTS
        end = end if whole == start else whole
        yield slice(start, end)
        start = end


def in_chunks(piece: Vector) -> Vector:
    """Return a piece as rows of one chunk each."""
    return piece.reshape(-1, min(piece.size, CHUNK_ELEMENTS))


def chunks_of(piece: slice) -> slice:
    """Return the numbers of the chunks that a piece consists of."""
    return slice(piece.start // CHUNK_ELEMENTS, -(-piece.stop // CHUNK_ELEMENTS))


def maxima_of(rows: Sequence[Vector], piece: slice) -> Vector:
    """Return the largest magnitude in any row, for each chunk of a piece; a NaN stays one."""
    largest = np.zeros(piece.stop - piece.start, np.float32)
    magnitudes = np.empty_like(largest)
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


class Dither:
    """The random numbers of a sum, as a function of (seed, step, turn, element, group)."""

    def __init__(self, seed: int, groups: int) -> None:
        self._seed: Final = seed
        self._groups: Final = groups
        # A stream of a bit generator never changes between versions of numpy (NEP 19).
        words = np.random.Philox(key=np.array([seed, 1], np.uint64)).random_raw(PIECE_ELEMENTS // 2)
        self._table: Final = words.view(np.uint32)
        self._sum = ""
        self._shifts: list[np.uint32] = []

    def begin(self, step: int, turn: int = 0) -> None:
        """Set the step, and the turn of it, of the sum that follows."""
        self._sum = f"{step} {turn}"
        order = sorted(range(self._groups), key=lambda group: self._hash(-1 - group))
        parts = (1 << 32) // self._groups
        self._shifts = [np.uint32(order.index(group) * parts) for group in range(self._groups)]

    def put(self, piece: slice, out: NDArray[np.uint32]) -> None:
        """Write the 32 random bits of each element of a piece: a·T[place] + b modulo 2³²."""
        number, place = divmod(piece.start, PIECE_ELEMENTS)
        word = self._hash(number)
        np.multiply(self._table[place : place + out.size], np.uint32(word & _MASK | 1), out=out)
        np.add(out, np.uint32(word >> 32), out=out)

    def of_group(self, group: int, bits: NDArray[np.uint32], out: NDArray[np.uint32]) -> Vector:
        """Return 1 + u for one group, in the memory of `out`."""
        np.add(bits, self._shifts[group], out=out)
        np.right_shift(out, np.uint32(9), out=out)
        np.bitwise_or(out, _ONE, out=out)
        return out.view(np.float32)

    def chosen(self, piece: slice, ratio: float) -> NDArray[np.bool_]:
        """Return which elements of a piece are kept, each with the probability `ratio`."""
        bits = np.empty(piece.stop - piece.start, np.uint32)
        self.put(piece, bits)
        return bits <= np.uint32(min(_MASK, int(ratio * (1 << 32)) - 1))

    def _hash(self, number: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._seed} {self._sum} {number}".encode())


_MASK: Final = (1 << 32) - 1


class Quantizer:
    """Adds up quantized groups, piece by piece; for one thread."""

    def __init__(self, groups: int, dither: Dither) -> None:
        # Arrays, as numpy takes three times as long for the lesser of an array and a number.
        self._least: Final = np.full(PIECE_ELEMENTS, 1 - levels(groups), np.float32)
        self._most: Final = np.full(PIECE_ELEMENTS, 1 + levels(groups), np.float32)
        self._dither: Final = dither
        self._bits: Final = np.empty((2, PIECE_ELEMENTS), np.uint32)
        self._scaled: Final = np.empty(PIECE_ELEMENTS, np.float32)
        self._rounded: Final = np.empty(PIECE_ELEMENTS, np.int8)

    def add_up(
        self,
        piece: slice,
        groups: Sequence[int],
        rows: Sequence[Vector],
        scales: Vector,
        total: NDArray[np.int8],
    ) -> None:
        """Write the sum of what groups have in a piece, whose chunks have these scales."""
        size = total.size
        bits, place = self._bits[:, :size]
        scaled, rounded = self._scaled[:size], self._rounded[:size]
        self._dither.put(piece, bits)
        divisors = np.where(scales == 0, np.float32(np.inf), scales).repeat(CHUNK_ELEMENTS)[:size]
        total.fill(0)
        for group, row in zip(groups, rows, strict=True):
            np.divide(row, divisors, out=scaled)
            np.add(scaled, self._dither.of_group(group, bits, place), out=scaled)
            np.floor(scaled, out=scaled)  # q + 1
            # Before the cast, which is undefined for what does not fit.
            np.maximum(scaled, self._least[:size], out=scaled)
            np.minimum(scaled, self._most[:size], out=scaled)
            np.copyto(rounded, scaled, casting="unsafe")
            np.add(total, rounded, out=total)
        np.subtract(total, np.int8(len(rows)), out=total)


def decode(total: NDArray[np.int8], scales: Vector, out: Vector) -> None:
    """Write the sum that `total` stands for."""
    np.copyto(out, total)
    rows = in_chunks(out)
    np.multiply(rows, scales[:, None], out=rows)
