from itertools import pairwise

import numpy as np
import pytest

from muster.datasets.order import positions, steps_per_epoch

BIG = [1_000_003, 2**31 + 11, 2**40 - 1, 2**62 + 12_345]


def order(samples: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return positions(samples, seed=seed, epoch=epoch, start=0, stop=samples)


@pytest.mark.slow
def test_every_sample_comes_once_per_epoch() -> None:
    for samples in range(301):
        for epoch in range(3):
            found = order(samples, epoch=epoch)
            assert np.array_equal(np.sort(found), np.arange(samples)), (samples, epoch)


@pytest.mark.parametrize("samples", BIG)
def test_no_sample_of_a_huge_set_comes_twice(samples: int) -> None:
    middle = samples // 2
    found = np.concatenate(
        [
            positions(samples, seed=1, epoch=1, start=start, stop=start + 20_000)
            for start in (0, middle, samples - 20_000)
        ]
    )
    assert len(np.unique(found)) == 60_000
    assert found.min() >= 0
    assert found.max() < samples


def test_any_part_of_the_order_matches_the_whole() -> None:
    whole = order(1000, seed=3, epoch=4)
    for start, stop in pairwise([0, 0, 1, 64, 65, 500, 1000]):
        part = positions(1000, seed=3, epoch=4, start=start, stop=stop)
        assert np.array_equal(part, whole[start:stop])
        assert part.dtype == np.int64


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 11), (11, 11)])
def test_position_outside_the_epoch_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="is not within"):
        positions(10, seed=0, epoch=0, start=start, stop=stop)


def test_order_never_changes() -> None:
    assert order(10, seed=1, epoch=2).tolist() == [0, 9, 6, 4, 2, 3, 5, 8, 7, 1]
    far = positions(10**12, seed=1, epoch=2, start=5, stop=8)
    assert far.tolist() == [152689912782, 564646125551, 19169213003]


def test_orders_of_seeds_and_epochs_differ() -> None:
    keys = [(seed, epoch) for seed in range(20) for epoch in range(20)] + [(2**63 - 1, 0)]
    orders = {order(50, seed=seed, epoch=epoch).tobytes() for seed, epoch in keys}
    assert len(orders) == len(keys)


@pytest.mark.slow
def test_pairs_are_uniform_over_positions() -> None:
    counts = np.zeros((16, 16), np.int64)
    for epoch in range(5000):
        first, second = positions(16, seed=4, epoch=epoch, start=0, stop=2)
        counts[first, second] += 1
    assert chi_square_per_freedom(counts[~np.eye(16, dtype=bool)]) < 1.4


def chi_square_per_freedom(counts: np.ndarray) -> float:
    """Return about 1 for counts that differ as chance has it, more for others."""
    return float(((counts - counts.mean()) ** 2).sum() / counts.mean() / (len(counts) - 1))


@pytest.mark.parametrize(
    ("samples", "batch_size", "steps"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (128, 64, 2)]
)
def test_steps_per_epoch_cover_all_samples(samples: int, batch_size: int, steps: int) -> None:
    assert steps_per_epoch(samples, batch_size) == steps
