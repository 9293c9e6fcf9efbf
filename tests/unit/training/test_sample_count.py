"""Counts and hashes that travel as floats come out exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.contracts.shards import HASH_MODULUS
from muster.datasets.index import Totals
from muster.training.sample_count import COUNT_ELEMENTS, decode_sample_count, encode_sample_count

SHARDS_LIMIT = 4096

totals = st.builds(Totals, lines=st.integers(0, 244), hash_sum=st.integers(0, HASH_MODULUS - 1))


def summed(read: list[Totals]) -> Totals:
    counts = np.array([one.lines for one in read], np.float32)
    hash_sums = np.array([one.hash_sum for one in read], np.uint64)
    leaves = encode_sample_count(counts, hash_sums)
    total = np.zeros(COUNT_ELEMENTS, np.float32)
    for leaf in leaves:
        total += leaf
    return decode_sample_count(total)


@pytest.mark.slow
@given(st.lists(totals, min_size=1, max_size=64))
def test_a_sum_of_tallies_is_the_tally_of_the_sum(read: list[Totals]) -> None:
    assert summed(read) == Totals(
        lines=sum(one.lines for one in read),
        hash_sum=sum(one.hash_sum for one in read) % HASH_MODULUS,
    )


def test_the_largest_sum_there_can_be_is_exact() -> None:
    most = Totals(lines=244, hash_sum=HASH_MODULUS - 1)
    assert summed([most] * SHARDS_LIMIT) == Totals(
        lines=244 * SHARDS_LIMIT, hash_sum=-SHARDS_LIMIT % HASH_MODULUS
    )
