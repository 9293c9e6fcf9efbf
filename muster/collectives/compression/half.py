"""Rounds float32 to 16 bits: fp16 (IEEE binary16) and bf16 (the upper half of a float32).

Both round to the nearest value, and to the even one of two that are equally near. A finite value
above the largest becomes infinity, infinities stay, and every NaN becomes the canonical one: what
was not finite never becomes a number. Denormals of float32 round like other values (fp16: to zero,
whose sign stays), denormals of fp16 are kept. Rounding twice changes nothing.

Vectors are flat and contiguous. numpy's own cast takes a hundred times as long for values that
underflow, as gradients do, so it is used only where a piece may overflow.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float32]
Halves: TypeAlias = NDArray[np.uint16]
"""The bits of 16-bit numbers."""

PIECE_ELEMENTS: Final = 16_384
"""64 KB: a piece and its temporaries stay in the second-level cache from pass to pass."""

FP16_NAN: Final = np.uint16(0x7E00)
BF16_NAN: Final = np.uint16(0x7FC0)

_SIGN: Final = np.uint32(0x8000_0000)
_EXPONENT: Final = np.uint32(0x7F80_0000)
_LEAST: Final = np.full(PIECE_ELEMENTS, 0x3880_0000, np.uint32)
"""2^-14, the smallest normal number of fp16: below it steps are as wide as there. An array, because
numpy takes three times as long for the larger of an array and a number."""
_LARGE: Final = np.uint32(0x4700_0000)
"""2^15: a piece with larger values may overflow, or hold NaN."""
_MAGIC: Final = np.uint32(0x06C0_0000)
"""Added to the exponent of x it gives M = 1.5 * 2^(e + 13), whose last bit is worth as much as that
of x in fp16: the processor rounds x + M to it, ties to even."""
_BIAS: Final = np.uint32(15 << 10)
"""Of the exponent in fp16. M may have it in its low bits, as it is even there."""


def round_fp16(x: Vector, out: Vector) -> None:
    """Write each element of `x`, rounded to fp16, into `out`, which may be `x`."""
    magics, signs = np.empty((2, PIECE_ELEMENTS), np.uint32)
    for piece, target in pieces_of(x, out):
        magic, sign, bits = magics[: piece.size], signs[: piece.size], piece.view(np.uint32)
        if not _exponents_of(bits, magic):
            target[...] = _cast(piece)
            continue
        np.add(magic, _MAGIC, out=magic)
        number = magic.view(np.float32)
        np.bitwise_and(bits, _SIGN, out=sign)
        np.subtract(np.add(piece, number), number, out=target)
        np.bitwise_or(target.view(np.uint32), sign, out=target.view(np.uint32))  # of a zero


def encode_fp16(x: Vector, out: Halves) -> None:
    """Write the bits of each element of `x`, rounded to fp16, into `out`."""
    exponents, magics, temporary = np.empty((3, PIECE_ELEMENTS), np.uint32)
    for piece, target in pieces_of(x, out):
        exponent, magic, other = (it[: piece.size] for it in (exponents, magics, temporary))
        bits = piece.view(np.uint32)
        if not _exponents_of(bits, exponent):
            target[...] = _cast(piece).view(np.uint16)
            continue
        np.add(exponent, _MAGIC + _BIAS, out=magic)
        number, absolute = magic.view(np.float32), other.view(np.float32)
        np.add(np.absolute(piece, out=absolute), number, out=number)
        # The low bits of |x| + M count the steps of fp16; those of the exponent's add to them.
        np.add(magic, np.right_shift(exponent, 13, out=exponent), out=magic)
        np.bitwise_and(np.right_shift(bits, 16, out=other), _SIGN >> 16, out=other)
        np.bitwise_or(magic, other, out=magic)
        np.copyto(target, magic, casting="unsafe")  # contiguous, as strides cost SIMD


def decode_fp16(bits: Halves, out: Vector) -> None:
    """Write the numbers that have these bits into `out`."""
    indices = np.empty(PIECE_ELEMENTS, np.intp)
    for piece, target in pieces_of(bits, out):
        index = indices[: piece.size]
        np.copyto(index, piece)
        np.take(_numbers(), index, out=target, mode="wrap")  # no mode but "raise" copies `out`


def round_bf16(x: Vector, out: Vector) -> None:
    """Write each element of `x`, rounded to bf16, into `out`, which may be `x`."""
    scratch = np.empty(PIECE_ELEMENTS, np.uint32)
    for piece, target in pieces_of(x, out):
        has_nan, rounded = _upper(piece, scratch)
        nans = np.isnan(piece) if has_nan else None
        np.bitwise_and(rounded, np.uint32(0xFFFF_0000), out=target.view(np.uint32))
        if nans is not None:
            target.view(np.uint32)[nans] = np.uint32(BF16_NAN) << 16


def encode_bf16(x: Vector, out: Halves) -> None:
    """Write the bits of each element of `x`, rounded to bf16, into `out`."""
    scratch = np.empty(PIECE_ELEMENTS, np.uint32)
    for piece, target in pieces_of(x, out):
        has_nan, rounded = _upper(piece, scratch)
        np.copyto(target, np.right_shift(rounded, 16, out=rounded), casting="unsafe")
        if has_nan:
            target[np.isnan(piece)] = BF16_NAN


def decode_bf16(bits: Halves, out: Vector) -> None:
    """Write the numbers that have these bits into `out`."""
    for piece, target in pieces_of(bits, out):
        number = target.view(np.uint32)
        np.copyto(number, piece)
        np.left_shift(number, 16, out=number)


def pieces_of(*vectors: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield the same piece of each vector, one after another."""
    for start in range(0, vectors[0].size, PIECE_ELEMENTS):
        yield tuple(vector[start : start + PIECE_ELEMENTS] for vector in vectors)


def _exponents_of(bits: NDArray[np.uint32], out: NDArray[np.uint32]) -> bool:
    """Write 2^e of each number, in place, at least 2^-14; False if a piece is for the cast."""
    np.bitwise_and(bits, _EXPONENT, out=out)
    if out.max() >= _LARGE:
        return False
    np.maximum(out, _LEAST[: out.size], out=out)
    return True


def _upper(piece: Vector, scratch: NDArray[np.uint32]) -> tuple[bool, NDArray[np.uint32]]:
    """Return whether a piece has a NaN, and bits whose upper halves are bf16, unless of a NaN."""
    bits, rounded = piece.view(np.uint32), scratch[: piece.size]
    # Half a step is added, or just less where the step below is even. NaN would carry into zero.
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    return math.isnan(piece.max()), rounded


def _cast(piece: Vector) -> NDArray[np.float16]:
    with np.errstate(all="ignore"):  # an overflow gives infinity, as it should
        halves = piece.astype(np.float16)
    halves.view(np.uint16)[np.isnan(piece)] = FP16_NAN
    return halves


@cache
def _numbers() -> Vector:
    """Return the number of each fp16: half as long as a cast, and as long for denormals."""
    numbers: Vector = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return numbers
