"""From a step to its place in the data, and what is behind it then."""

import pytest

from muster.contracts.shards import HASH_MODULUS, Position
from muster.datasets.index import Totals
from muster.training.schedule import Schedule
from muster.training.state_sync import Committed

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


def walked(steps: int) -> Committed:
    committed = Committed(position=Position())
    for step in range(steps):
        committed = SCHEDULE.advance(committed, READ[step % 3])
    return committed


def test_an_epoch_ends_where_the_data_does() -> None:
    assert (SCHEDULE.steps_per_epoch, SCHEDULE.total_steps) == (3, 6)
    assert [SCHEDULE.epoch_and_step(step) for step in (0, 2, 3, 5)] == [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 2),
    ]


def test_what_was_consumed_adds_up_within_an_epoch_and_begins_anew_with_the_next() -> None:
    consumed = [walked(steps).position.consumed for steps in range(1, 7)]
    assert consumed == [4, 8, 10, 4, 8, 10]
    assert walked(3).position.consumed_hash == HASH_MODULUS - 1, "modulo 2 to the 64"
    assert [walked(steps).position.epoch for steps in (3, 4)] == [0, 1]


def test_whole_epochs_are_kept_with_what_they_should_have_been() -> None:
    assert [len(walked(steps).epochs) for steps in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    first, second = walked(6).epochs
    assert (first.epoch, second.epoch) == (0, 1)
    for epoch in (first, second):
        assert (epoch.samples, epoch.expected_samples) == (10, 10)
        assert epoch.hash_sum == epoch.expected_hash_sum == HASH_MODULUS - 1


@pytest.mark.parametrize(("step", "is_due"), [(1, False), (5, True), (6, True)])
def test_a_checkpoint_is_due_every_so_often_and_at_the_end(step: int, *, is_due: bool) -> None:
    assert SCHEDULE.is_checkpoint_due(Position(step=step)) is is_due
    assert SCHEDULE.is_over(Position(step=step)) is (step == 6)
