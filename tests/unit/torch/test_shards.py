"""Which samples a virtual shard of a PyTorch job holds."""

import random
from itertools import chain

import numpy as np
import pytest

from muster.collectives.reduction.tree import Block
from muster.training.sample_count import decode_sample_count
from muster.training.schedule import Schedule
from muster.training.schema import Leaf

torch = pytest.importorskip("torch")

from torch.utils.data import RandomSampler, WeightedRandomSampler

from muster.program import InvalidProgram
from muster.torch.shards import (
    Batches,
    Prefetcher,
    Sampler,
    ShardLoader,
    deal,
    set_generators,
    totals_of,
)


@pytest.mark.parametrize("shards", [1, 2, 8, 32])
@pytest.mark.parametrize("samples", [1, 2, 3, 5, 15, 16, 17, 64, 100])
def test_samples_are_dealt_evenly_at_least_two_each(samples: int, shards: int) -> None:
    dealt = deal(samples, shards)
    sizes = [stop - start for start, stop in dealt if stop > start]
    assert len(dealt) == shards
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 2 or samples < 2
    assert [number for start, stop in dealt for number in range(start, stop)] == [*range(samples)]


def test_each_epoch_reads_every_sample_once() -> None:
    totals = totals_of(150)
    schedule = Schedule(
        totals=totals, batch_size=64, virtual_shards=8, epochs=2, seed=3, checkpoint_every=5
    )
    loader, whole = ShardLoader(schedule), Block(3, 0)
    orders = []
    for epoch in range(2):
        steps = range(3 * epoch, 3 * epoch + 3)
        loaded = [loader.load(step, whole) for step in steps]
        orders.append(np.concatenate([np.concatenate(it.batches) for it in loaded]).tolist())
        counted = [decode_sample_count(it.sample_counts.sum(axis=0)) for it in loaded]
        assert sum(it.lines for it in counted) == totals.lines
        assert sum(it.hash_sum for it in counted) % 2**64 == totals.hash_sum
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(150)]
    assert orders[0] != orders[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_made_ahead_are_those_of_their_leaves(workers: int) -> None:
    schedule = Schedule(
        totals=totals_of(70), batch_size=16, virtual_shards=4, epochs=3, seed=3, checkpoint_every=5
    )
    batches = Batches(schedule, range(70), lambda items: (items, torch.rand(1).item()))
    shards = {step: [0, 1, 2, 3] for step in range(15)}
    shards |= {4: [0, 1, 2], 9: [0, 1, 2], 14: [0, 1, 2]}  # six samples are for three
    shards[2] = [0, 1, 3, 2]  # dealt anew within a step
    shards |= {6: [1, 0], 7: [0, 1], 11: [3]}  # with other ranks
    prefetcher = Prefetcher(batches, workers, schedule)
    for step in range(15):
        for shard in shards[step]:
            leaf = Leaf(step, shard)
            numbers = ShardLoader(schedule).numbers(step)[shard]
            assert prefetcher.read(leaf, numbers) == batches[leaf], leaf


def test_a_part_of_a_step_is_the_same_part() -> None:
    schedule = Schedule(
        totals=totals_of(100), batch_size=64, virtual_shards=8, epochs=1, seed=3, checkpoint_every=5
    )
    loader = ShardLoader(schedule)
    whole, half = loader.load(1, Block(3, 0)), loader.load(1, Block(2, 1))
    assert [it.tolist() for it in half.batches] == [it.tolist() for it in whole.batches[4:]]


GENERATORS = {
    "torch": (torch.Generator, lambda it: torch.rand(1, generator=it).item()),
    "numpy": (np.random.default_rng, lambda it: it.random()),
    "philox": (lambda: np.random.Generator(np.random.Philox()), lambda it: it.random()),
    "older": (np.random.RandomState, lambda it: it.rand()),
    "python": (random.Random, lambda it: it.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_registered_generator_depends_on_the_leaf_alone(kind: str) -> None:
    schedule = Schedule(
        totals=totals_of(70), batch_size=16, virtual_shards=4, epochs=3, seed=3, checkpoint_every=5
    )
    make, draw = GENERATORS[kind]
    found = []
    for leaves in ([(0, 0), (0, 1), (7, 1)], [(7, 1), (0, 1), (0, 0)]):
        own = {"one": make(), "other": make()}
        drawn = {}
        for leaf in leaves:
            set_generators(schedule, *leaf, own)
            drawn[leaf] = [draw(it) for it in own.values()]
        found.append(drawn)
    assert found[0] == found[1]
    numbers = [number for drawn in found[0].values() for number in drawn]
    assert len({*numbers, torch.rand(1).item()}) == len(numbers) + 1


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 0.0] * 10, 24),
    "own generator": lambda: RandomSampler(range(24), generator=torch.Generator()),
    "function": lambda: lambda epoch: reversed(range(epoch, epoch + 24)),
    "in order": lambda: range(24),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_gives_the_order_of_an_epoch(kind: str, workers: int) -> None:
    schedule = Schedule(
        totals=totals_of(24), batch_size=16, virtual_shards=4, epochs=3, seed=3, checkpoint_every=5
    )
    orders = []
    for epochs in ([0, 1, 2], [2, 0]):  # a newcomer begins anywhere
        batches = Batches(schedule, range(100), list, Sampler(SAMPLERS[kind](), 3))
        read = Prefetcher(batches, workers, schedule).read if workers else batches.make
        found = {}
        for epoch in epochs:
            leaves = [
                Leaf(step, shard) for step in (2 * epoch, 2 * epoch + 1) for shard in range(4)
            ]
            numbers = [ShardLoader(schedule).numbers(it.step)[it.shard] for it in leaves]
            found[epoch] = [*chain.from_iterable(map(read, leaves, numbers))]
        orders.append(found)
    assert all(orders[0][epoch] == order for epoch, order in orders[1].items())
    assert all(len(order) == 24 for order in orders[0].values())
    if kind == "function":
        assert orders[0][2] == [*reversed(range(2, 26))]
    if kind == "in order":
        assert orders[0][2] == [*range(24)]
    if kind == "weighted":
        assert orders[0][0] != orders[0][1]
        assert all(number % 3 != 2 for number in orders[0][0])


IMPURE = [
    (lambda _: np.random.default_rng().permutation(24), "for the same epoch again"),
    (torch.utils.data.BatchSampler(range(24), 4, drop_last=False), "the number of a sample at a"),
]


@pytest.mark.parametrize(("given", "problem"), IMPURE)
def test_a_sampler_without_an_order_is_refused(given: object, problem: str) -> None:
    with pytest.raises(InvalidProgram, match=problem):
        Sampler(given, 3)
