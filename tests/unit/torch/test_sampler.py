"""The order of the managed loop, for scripts with a loop of their own."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives.reduction.tree import Block
from muster.program import InvalidProgram
from muster.training.schedule import Schedule

torch = pytest.importorskip("torch")

from muster.torch import sampler
from muster.torch.shards import ShardLoader, totals_of

WORLD_SIZES = st.integers(1, 7)


def batches(
    samples: int, batch_size: int, world_size: int, *, epoch: int = 0, start: int = 0, seed: int = 0
) -> list[list[list[int]]]:
    """Return the batches of each rank in an epoch."""
    found = []
    for rank in range(world_size):
        one = sampler(
            range(samples), batch_size=batch_size, seed=seed, rank=rank, world_size=world_size
        )
        one.set_epoch(epoch)
        one.start_at(start)
        found.append(list(one))
        assert len(one) == len(found[-1])
    return found


def drawn(found: list[list[list[int]]]) -> list[int]:
    return [number for rank in found for batch in rank for number in batch]


@pytest.mark.slow
@given(st.data(), st.integers(0, 120), st.integers(7, 40), WORLD_SIZES, WORLD_SIZES)
def test_a_change_of_world_size_draws_every_sample_once(
    data: st.DataObject, samples: int, batch_size: int, before: int, after: int
) -> None:
    steps = -(-samples // batch_size)
    epoch, done = data.draw(st.integers(0, 3)), data.draw(st.integers(0, steps))
    first = batches(samples, batch_size, before, epoch=epoch)
    start = epoch * steps + done
    rest = batches(samples, batch_size, after, epoch=epoch, start=start)
    assert sorted(drawn([rank[:done] for rank in first]) + drawn(rest)) == [*range(samples)]
    if epoch:
        assert drawn(batches(samples, batch_size, after, epoch=epoch - 1, start=start)) == []
    following = batches(samples, batch_size, after, epoch=epoch + 1, start=start)
    assert sorted(drawn(following)) == [*range(samples)]


@pytest.mark.slow
@given(st.integers(1, 120), WORLD_SIZES, st.integers(0, 2))
def test_a_step_reads_what_the_managed_loop_reads(samples: int, world_size: int, seed: int) -> None:
    schedule = Schedule(
        totals=totals_of(samples),
        batch_size=16,
        virtual_shards=8,
        epochs=2,
        seed=seed,
        checkpoint_every=5,
    )
    loader = ShardLoader(schedule)
    for epoch in range(2):
        ranks = batches(samples, 16, world_size, epoch=epoch, seed=seed)
        steps = schedule.total_steps // 2
        for step in range(steps):
            whole = np.concatenate(loader.load(epoch * steps + step, Block(3, 0)).batches)
            parts = [rank[step] if step < len(rank) else [] for rank in ranks]
            assert [*chain.from_iterable(parts)] == whole.tolist()


def test_a_loader_takes_rank_and_world_size_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(20))
    seen = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler(data, batch_size=6))
        assert len(loader) == 4 - (rank == 2)
        seen += [number for (batch,) in loader for number in batch.tolist()]
    assert sorted(seen) == [*range(20)]


REFUSED = [
    ({"rank": 2, "world_size": 2}, "there is no rank 2 of 2"),
    ({"rank": 0, "world_size": 9}, "9 ranks share a batch_size of 8: raise it"),
    ({"batch_size": 0}, "share a batch_size of 0"),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_an_impossible_order_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidProgram, match=problem):
        sampler(**{"dataset": range(4), "batch_size": 8, **changes})
