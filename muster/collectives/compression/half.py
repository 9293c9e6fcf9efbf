"""Rounds float32 to 16 bits: fp16 (IEEE binary16) and bf16 (the upper half of a float32).

Both round to the nearest value, and to the even one of two that are equally near. A finite value
above the largest becomes infinity, infinities stay, and every NaN becomes the canonical one: what
was not finite never becomes a number. Denormals of float32 round like other values (fp16: to zero,
whose sign stays), denormals of fp16 are kept. Rounding twice changes nothing.

Vectors are flat and contiguous. numpy's own cast takes a hundred times as long for values that
underflow, as gradients do, so it is used only where a piece may overflow.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.compression.kind import PIECE_ELEMENTS, Dense, Vector, pieces_of

Halves: TypeAlias = NDArray[np.uint16]
"""The bits of 16-bit numbers."""

FP16_NAN: Final = np.uint16(0x7E00)
BF16_NAN: Final = np.uint16(0x7FC0)

_EXPONENT: Final = np.uint32(0x7F80_0000)
_LEAST: Final = np.full(PIECE_ELEMENTS, 0x3880_0000, np.uint32)
"""2^-14, the smallest normal number of fp16: below it steps are as wide as there. An array, because
numpy takes three times as long for the larger of an array and a number."""
_LARGE: Final = np.uint32(0x4700_0000)
"""2^15: a piece with larger values may overflow, or hold NaN."""
_MAGIC: Final = np.uint32(0x06C0_0000 + (15 << 10))
"""Added to the exponent of x it gives M = 1.5 * 2^(e + 13), whose last bit is worth as much as that
of x in fp16: the processor rounds x + M to it, ties to even. The low bits of M are the bias of the
exponent in fp16, an even number of steps."""

_Function: TypeAlias = Callable[[NDArray[Any], NDArray[Any]], None]


def _in_pieces(function: _Function) -> _Function:
    @wraps(function)
    def run(source: NDArray[Any], out: NDArray[Any]) -> None:
        for piece in pieces_of(source, out):
            function(*piece)

    return run


@_in_pieces
def encode_fp16(x: Vector, out: Halves) -> None:
    """Write the bits of each element of `x`, rounded to fp16, into `out`."""
    bits = x.view(np.uint32)
    exponent = bits & _EXPONENT
    if exponent.max() >= _LARGE:
        with np.errstate(all="ignore"):  # an overflow gives infinity, as it should
            np.copyto(out.view(np.float16), x, casting="same_kind")
        out[np.isnan(x)] = FP16_NAN
        return
    np.maximum(exponent, _LEAST[: x.size], out=exponent)
    magic = exponent + _MAGIC
    np.add(np.absolute(x), magic.view(np.float32), out=magic.view(np.float32))
    # The low bits of |x| + M count the steps of fp16; those of the exponent's add to them.
    magic += np.right_shift(exponent, 13, out=exponent)
    np.right_shift(bits, 16, out=exponent)
    magic |= np.bitwise_and(exponent, 0x8000, out=exponent)
    np.copyto(out, magic, casting="unsafe")  # contiguous, as strides cost SIMD


@_in_pieces
def decode_fp16(bits: Halves, out: Vector) -> None:
    """Write the numbers that have these bits into `out`."""
    np.take(_numbers(), bits.astype(np.intp), out=out, mode="wrap")  # "raise" would copy `out`


@_in_pieces
def encode_bf16(x: Vector, out: Halves) -> None:
    """Write the bits of each element of `x`, rounded to bf16, into `out`."""
    # Half a step is added, or just less where the step below is even. NaN would carry into zero.
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    np.copyto(out, np.right_shift(rounded, 16, out=rounded), casting="unsafe")
    if math.isnan(x.max()):
        out[np.isnan(x)] = BF16_NAN


@_in_pieces
def decode_bf16(bits: Halves, out: Vector) -> None:
    """Write the numbers that have these bits into `out`."""
    number = out.view(np.uint32)
    np.copyto(number, bits)
    np.left_shift(number, 16, out=number)


def _round(encode: _Function, decode: _Function, x: Vector, out: Vector) -> None:
    """Write each element of `x`, rounded, into `out`, which may be `x`."""
    for piece, target in pieces_of(x, out):
        bits = np.empty(piece.size, np.uint16)
        encode(piece, bits)
        decode(bits, target)


round_fp16 = partial(_round, encode_fp16, decode_fp16)
round_bf16 = partial(_round, encode_bf16, decode_bf16)


@dataclass
class Half(Dense):
    """2 bytes an element. "fp16" is within 2^-11 of each from 2^-14 to 65,504, "bf16" 2^-8."""

    name: str
    rounds_sums = True
    layout = ((np.uint16, 1),)

    def encode_piece(self, piece: Vector, *codes: NDArray[Any]) -> None:
        (encode_fp16 if self.name == "fp16" else encode_bf16)(piece, codes[0])

    def decode_piece(self, out: Vector, *codes: NDArray[Any]) -> None:
        (decode_fp16 if self.name == "fp16" else decode_bf16)(codes[0], out)


@cache
def _numbers() -> Vector:
    """Return the number of each fp16: half as long as a cast, and as long for denormals."""
    numbers: Vector = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return numbers
