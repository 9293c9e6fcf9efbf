"""The order of the samples of an epoch: a function of (seed, epoch) alone.

A keyed permutation of [0, n) that is computed and not stored, so any part of the order of any epoch
is available at once, in constant memory, and equal on every machine: it uses integers only.

It is a Feistel network over the smallest power of two that is at least n: a number is cut into a
left and a right half, and each round adds a keyed mixture of one half to the other, which is
invertible for any mixture. A result that is not below n is permuted again until it is (*cycle
walking*): that follows the cycle of the larger permutation back into the range, so all numbers stay
different, and it takes less than two turns on average. (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002.)
"""

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]

ROUNDS: Final = 8
"""Even, so that halves of unequal width are back in their places. Four rounds are enough for
thousands of samples, six for hundreds; with eight, every pair of a dozen is equally likely."""

_KEYS: Final = struct.Struct(f"<{ROUNDS}Q")

# The odd constants of the 64-bit finalizer of MurmurHash3.
_FIRST: Final = np.uint64(0xFF51AFD7ED558CCD)
_SECOND: Final = np.uint64(0xC4CEB9FE1A85EC53)
_HALF_WORD: Final = np.uint64(32)


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return how many global batches cover every sample once; the last may not be full."""
    return math.ceil(samples / batch_size)


def positions(samples: int, *, seed: int, epoch: int, start: int, stop: int) -> Numbers:
    """Return the samples at the positions [start, stop) of an epoch, in that order.

    Over all positions, every number in [0, samples) comes once. `seed` and `epoch` are below 2**64.
    """
    if not 0 <= start <= stop <= samples:
        raise ValueError(f"[{start}, {stop}) is not within [0, {samples})")
    network = _Network(samples, seed, epoch)
    found = network.apply(np.arange(start, stop, dtype=np.uint64))
    outside = np.flatnonzero(found >= samples)
    while outside.size:
        found[outside] = network.apply(found[outside])
        outside = outside[found[outside] >= samples]
    return found.astype(np.int64)


class _Network:
    """A keyed permutation of [0, 2**bits), the smallest that holds all samples."""

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        bits = max(1, (samples - 1).bit_length())
        self._widths = (bits // 2, bits - bits // 2)
        self._keys = _keys(seed, epoch)

    def apply(self, numbers: _Words) -> _Words:
        left_bits, right_bits = self._widths
        left = numbers >> np.uint64(right_bits)
        right = numbers & _mask(right_bits)
        for key in self._keys:
            left, right = right, left ^ (_mixed(right, key) & _mask(left_bits))
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right


def _mixed(half: _Words, key: np.uint64) -> _Words:
    """Return words whose low bits depend on every bit of `half` and of `key`."""
    mixed = (half ^ key) * _FIRST
    mixed ^= mixed >> _HALF_WORD
    mixed *= _SECOND
    mixed ^= mixed >> _HALF_WORD
    return mixed


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _keys(seed: int, epoch: int) -> Sequence[np.uint64]:
    """Return one key per round; other seeds or epochs give unrelated keys."""
    digest = blake2b(struct.pack("<QQ", seed, epoch), digest_size=_KEYS.size).digest()
    return [np.uint64(key) for key in _KEYS.unpack(digest)]
