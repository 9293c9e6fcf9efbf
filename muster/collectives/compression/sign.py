"""One bit an element, its sign, and a scale: the mean magnitude of 1,024 elements.

Seide et al., "1-bit stochastic gradient descent", 2014. Two bits are the same once more, for what
one bit leaves: four levels, which lie where the magnitudes are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.collectives.compression.int8 import ROW_ELEMENTS, spread, starts_of
from muster.collectives.compression.kind import Dense, Vector
from muster.collectives.errors import Unsupported


@dataclass
class Sign(Dense):
    """`bits` of 1 or more, each with a scale; 0.129 bytes an element and bit. Zero counts as +."""

    bits: int = 1

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise Unsupported(f"signs have no {self.bits} bits: use 1 to 8")
        self.layout = ((np.float32, ROW_ELEMENTS), (np.uint8, 8)) * self.bits

    def encode_piece(self, piece: Vector, *codes: NDArray[Any]) -> None:
        starts, rest = starts_of(piece), piece
        sizes = np.diff(starts, append=piece.size)
        for scales, signs in zip(codes[::2], codes[1::2], strict=True):
            np.divide(np.add.reduceat(np.absolute(rest), starts), sizes, out=scales)
            np.copyto(signs, np.packbits(np.signbit(rest)))
            if len(codes) > 2:  # noqa: PLR2004  there are further bits
                rest = rest - np.copysign(spread(scales, rest), rest)

    def decode_piece(self, out: Vector, *codes: NDArray[Any]) -> None:
        out[...] = 0
        for scales, signs in zip(codes[::2], codes[1::2], strict=True):
            bits = np.unpackbits(signs, count=out.size).astype(np.uint32)
            np.left_shift(bits, 31, out=bits)
            np.bitwise_or(bits, spread(scales, out).view(np.uint32), out=bits)
            np.add(out, bits.view(np.float32), out=out)
