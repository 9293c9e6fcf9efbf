"""Counts the samples that a step consumed, inside the same sum as its gradients.

The count and the hashes of the lines are integers, which float32 adds exactly below 2^24. A 64-bit
hash therefore travels as its eight bytes, one element each: over at most 4096 leaves no sum of
bytes exceeds 2^20, and the eight exact sums make one sum modulo 2^64. No further exchange is
needed, and what a rank read before it died is not counted.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.reduction.reducer import Vector
from muster.contracts.shards import HASH_MODULUS
from muster.datasets.index import Totals

COUNT_ELEMENTS: Final = 9

_HASH_BYTES: Final = 8


def encode_sample_count(
    counts: NDArray[np.float32], hash_sums: NDArray[np.uint64]
) -> NDArray[np.float32]:
    """Return (leaves, 9) elements for (leaves,) line counts and sums of line hashes."""
    encoded = np.empty((len(counts), COUNT_ELEMENTS), np.float32)
    encoded[:, 0] = counts
    # Little-endian on every host: element i counts 256^i, as in `decode_sample_count`.
    encoded[:, 1:] = hash_sums.astype("<u8").view(np.uint8).reshape(-1, _HASH_BYTES)
    return encoded


def decode_sample_count(total: Vector) -> Totals:
    """Return the lines and the hash sum in the (9,) elements of the root's sum."""
    sums = [int(value) for value in total.tolist()]
    hash_sum = sum(value << (8 * place) for place, value in enumerate(sums[1:]))
    return Totals(lines=sums[0], hash_sum=hash_sum % HASH_MODULUS)
