"""One byte an element: multiples of a scale, the largest element of 1,024 divided by 127."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.compression.kind import Dense, Vector

ROW_ELEMENTS: Final = 1024
"""What has one scale."""

_LEAST: Final = np.finfo(np.float32).tiny
"""A smaller scale is a denormal, of few digits: elements would exceed 127."""


@dataclass
class Int8(Dense):
    """Within 1/254 of the largest of 1,024 elements; 1.004 bytes an element.

    Elements of which the largest is below 1.5e-36 become zero.
    """

    rounds_sums = True
    layout = ((np.float32, ROW_ELEMENTS), (np.int8, 1))

    def encode_piece(self, piece: Vector, *codes: NDArray[Any]) -> None:
        scales, integers = codes
        number = np.absolute(piece)
        np.maximum.reduceat(number, starts_of(piece), out=scales)
        scales /= np.float32(127)
        scales[scales < _LEAST] = np.inf
        np.divide(piece, spread(scales, piece), out=number)
        np.copyto(integers, np.rint(number, out=number), casting="unsafe")
        scales[scales == np.inf] = 0

    def decode_piece(self, out: Vector, *codes: NDArray[Any]) -> None:
        scales, integers = codes
        np.copyto(out, integers)
        np.multiply(out, spread(scales, out), out=out)


def starts_of(piece: Vector) -> NDArray[np.intp]:
    """Return where rows begin. The last one may be short."""
    return np.arange(0, piece.size, ROW_ELEMENTS)


def spread(scales: Vector, piece: Vector) -> Vector:
    """Return the scale of each element. Broadcasting rows takes twice as long."""
    return np.repeat(scales, ROW_ELEMENTS)[: piece.size]
