"""The elements of largest magnitude, and where they are.

Aji and Heafield, "Sparse communication for distributed gradient descent", 2017.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.compression.kind import (
    PIECE_ELEMENTS,
    Dense,
    Float32,
    Kind,
    Message,
    Sparse,
    Vector,
    joined,
    pieces_of,
    split,
)
from muster.collectives.errors import PeerRefused, Unsupported

_ESCAPE: Final = 255
"""A gap that has four bytes, after those of one byte."""

_MAGNITUDE: Final = np.uint32(0x7FFF_FFFF)
"""The bits of magnitudes are ordered as the magnitudes are."""

_SAMPLE: Final = 16_384


@dataclass
class TopK(Sparse):
    """max(1, ⌊n · ratio⌋) elements; of equal magnitudes at the border those that come first.

    Their values are of the kind `values`, their places gaps to the place before, mostly of a byte.
    """

    values: Kind = field(default_factory=Float32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.values, Dense):
            raise Unsupported(f"top_k has no values of {self.values!r}: use int8 or sign")

    def encode_body(self, array: Vector, room: int = 0) -> Message:
        flat = array.reshape(-1)
        places = largest(flat, self.kept_of(flat.size))
        gaps = np.diff(places, prepend=-1) - 1
        long = gaps[gaps >= _ESCAPE].astype(np.uint32)
        short = np.minimum(gaps, _ESCAPE).astype(np.uint8)
        return joined(room, short, long, self.values.encode_body(flat[places]))

    def add_body(self, body: Message, out: Vector, factor: float) -> None:
        kept = self.kept_of(out.size)
        escaped = np.flatnonzero(body[:kept] == _ESCAPE)
        used = kept + 4 * escaped.size
        short, long = split(body[:used], (np.uint8, kept), (np.uint32, escaped.size))
        gaps = short.astype(np.int64)
        gaps[escaped] = long
        places = np.cumsum(gaps + 1) - 1
        if places[-1] >= out.size:  # they only grow, so none is there twice
            raise PeerRefused(
                f"a compressed gradient has an element {places[-1]}, of {out.size}: it is damaged"
            )
        values = np.zeros(kept, np.float32)
        self.values.add_body(body[used:], values, factor)
        out.reshape(-1)[places] += values


def largest(flat: Vector, count: int) -> NDArray[np.intp]:
    """Return the places of the `count` largest magnitudes, in order; of equal ones the first.

    The largest of a sample say above which magnitude to look. If that gives too few, more of the
    sample does, so that the sample changes the time and never the choice.
    """
    magnitudes = flat.view(np.uint32)
    sample = np.sort(magnitudes[:: -(-flat.size // _SAMPLE)] & _MAGNITUDE)
    expected = count * sample.size / flat.size
    wanted = int(1.1 * expected + 3 * expected**0.5) + 2
    found = np.empty(0, np.intp)
    while found.size < count:
        threshold = sample[-wanted] if wanted <= sample.size else np.uint32(0)
        pieces = enumerate(pieces_of(magnitudes))
        masks = ((number, (piece & _MAGNITUDE) >= threshold) for number, (piece,) in pieces)
        found = np.concatenate([np.flatnonzero(mask) + n * PIECE_ELEMENTS for n, mask in masks])
        wanted *= 2
    candidates = magnitudes[found] & _MAGNITUDE
    least = np.partition(candidates, -count)[-count]
    is_kept = candidates > least
    equal = np.flatnonzero(candidates == least)
    is_kept[equal[: count - np.count_nonzero(is_kept)]] = True
    places: NDArray[np.intp] = found[is_kept]
    return places
