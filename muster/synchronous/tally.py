"""What a step has consumed, carried through the same sum as its gradients.

Count and hashes of the lines that were read are whole numbers, and float32 adds those exactly below
2^24. So a 64-bit hash travels as its eight bytes, each an element of its own: over at most 4096
leaves no sum of bytes exceeds 2^20, and eight exact sums make one modulo 2^64. Nothing is exchanged
beside the gradients, and what a rank read that died counts for nobody.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Vector
from muster.contracts.position import HASH_MODULUS
from muster.datasets.index import Totals

TALLY_ELEMENTS: Final = 9

_BYTES: Final = 8


def tally_of(counts: NDArray[np.float32], hash_sums: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return (leaves, 9) elements for (leaves,) counts of lines and sums of their hashes."""
    tally = np.empty((len(counts), TALLY_ELEMENTS), np.float32)
    tally[:, 0] = counts
    tally[:, 1:] = hash_sums.astype("<u8").view(np.uint8).reshape(-1, _BYTES)
    return tally


def read_tally(total: Vector) -> Totals:
    """Return what the (9,) elements of the root say."""
    sums = [int(value) for value in total.tolist()]
    hash_sum = sum(value << (8 * place) for place, value in enumerate(sums[1:]))
    return Totals(lines=sums[0], hash_sum=hash_sum % HASH_MODULUS)
