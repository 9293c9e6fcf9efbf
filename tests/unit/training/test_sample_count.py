"""From a step to its place in the data, and the exact count of what it consumed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.contracts.job.field_types import CheckpointEvery
from muster.contracts.shards import HASH_MODULUS, Position
from muster.datasets.index import Totals
from muster.training.groups.state_sync import Committed
from muster.training.sample_count import COUNT_ELEMENTS, decode_sample_count, encode_sample_count
from muster.training.schedule import Schedule

SCHEDULE = Schedule(
    totals=Totals(lines=10, hash_sum=HASH_MODULUS - 1),
    batch_size=4,
    virtual_shards=4,
    epochs=2,
    seed=0,
    checkpoint_every=5,
)
"""Three steps an epoch, the last of them half empty."""

READ = [
    Totals(lines=4, hash_sum=HASH_MODULUS - 3),
    Totals(lines=4, hash_sum=1),
    Totals(lines=2, hash_sum=1),
]


def advanced(steps: int) -> Committed:
    committed = Committed(position=Position())
    for step in range(steps):
        committed = SCHEDULE.advance(committed, READ[step % 3])
    return committed


def test_epoch_ends_with_the_data() -> None:
    assert (SCHEDULE.steps_per_epoch, SCHEDULE.total_steps) == (3, 6)
    places = [SCHEDULE.epoch_and_step(step) for step in (0, 2, 3, 5)]
    assert places == [(0, 0), (0, 2), (1, 0), (1, 2)]


def test_consumed_samples_add_up_within_an_epoch() -> None:
    positions = [advanced(steps).position for steps in range(1, 7)]
    assert [position.consumed for position in positions] == [4, 8, 10, 4, 8, 10]
    assert [position.epoch for position in positions] == [0, 0, 0, 1, 1, 1]
    assert positions[2].consumed_hash == HASH_MODULUS - 1, "modulo 2 to the 64"


def test_finished_epochs_are_kept_with_the_expected_totals() -> None:
    assert [len(advanced(steps).epochs) for steps in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    for number, epoch in enumerate(advanced(6).epochs):
        assert (epoch.epoch, epoch.samples, epoch.expected_samples) == (number, 10, 10)
        assert epoch.hash_sum == epoch.expected_hash_sum == HASH_MODULUS - 1


@pytest.mark.parametrize(
    ("every", "step", "is_time", "is_due"),
    [
        (5, 1, True, False),
        (5, 5, False, True),
        (5, 6, False, True),
        ("auto", 5, False, False),
        ("auto", 1, True, True),
        ("auto", 6, False, True),
    ],
)
def test_checkpoint_is_due_at_intervals_and_at_the_end(
    every: CheckpointEvery, step: int, *, is_time: bool, is_due: bool
) -> None:
    schedule = replace(SCHEDULE, checkpoint_every=every)
    committed = Committed(position=Position(step=step))
    assert schedule.is_checkpoint_due(committed, is_time=is_time) is is_due
    assert SCHEDULE.is_over(committed) is (step == 6)


def summed(read: list[Totals]) -> Totals:
    counts = np.array([one.lines for one in read], np.float32)
    hash_sums = np.array([one.hash_sum for one in read], np.uint64)
    total = np.zeros(COUNT_ELEMENTS, np.float32)
    for leaf in encode_sample_count(counts, hash_sums):
        total += leaf
    return decode_sample_count(total)


totals = st.builds(Totals, lines=st.integers(0, 244), hash_sum=st.integers(0, HASH_MODULUS - 1))


@pytest.mark.slow
@given(st.lists(totals, min_size=1, max_size=64))
def test_counts_add_up_exactly_as_floats(read: list[Totals]) -> None:
    assert summed(read) == Totals(
        lines=sum(one.lines for one in read),
        hash_sum=sum(one.hash_sum for one in read) % HASH_MODULUS,
    )


def test_largest_possible_count_is_exact() -> None:
    most = Totals(lines=244, hash_sum=HASH_MODULUS - 1)
    expected = Totals(lines=244 * 4096, hash_sum=-4096 % HASH_MODULUS)
    assert summed([most] * 4096) == expected
