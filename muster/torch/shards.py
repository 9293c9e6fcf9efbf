"""Which samples of a data set a virtual shard holds, and its batch of them.

Both are functions of (seed, epoch, step, shard).

The order of an epoch is the permutation that all managed training uses. A step takes the next
samples of it and deals them to its shards as evenly as possible, at least two to each while there
are two: a full batch and the last one of an epoch alike. A shard may be empty; nothing is padded.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from xxhash import xxh3_64_intdigest

from muster.collectives.reduction.tree import Block
from muster.contracts.settings.environ import RankSettings
from muster.contracts.shards import HASH_MODULUS, ranges
from muster.datasets.index import Totals
from muster.datasets.order import positions
from muster.program import InvalidProgram
from muster.training.batches import BlockBatches
from muster.training.sample_count import encode_sample_count
from muster.training.schedule import Schedule
from muster.training.schema import Leaf

SAMPLES_MIN: Final = 2
"""Of a shard, while a step has so many: some layers need two samples for a variance."""

CHUNK: Final = 1 << 20

ALIGNMENT: Final = 64
"""Bytes; a cache line. The allocator's tensors begin at multiples of it."""

Numbers = NDArray[np.int64]

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_ORDER: Final = (1 << 32) + 1
"""Takes the place of a shard's number for the order of an epoch."""


class Dataset(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...  # noqa: ANN401


class DroppingSchedule(Schedule):
    """Leaves out the samples of an epoch that do not fill a batch, which differ between epochs."""

    drop_last: ClassVar[bool] = True

    @property
    def steps_per_epoch(self) -> int:
        return self.totals.lines // self.batch_size

    def expected(self, epoch: int) -> Totals:
        lines, read = self.totals.lines, self.steps_per_epoch * self.batch_size
        left_out = positions(lines, seed=self.seed, epoch=epoch, start=read, stop=lines)
        hash_sum = self.totals.hash_sum - int(_hashes(left_out).sum(dtype=np.uint64))
        return Totals(lines=read, hash_sum=hash_sum % HASH_MODULUS)


def schedule_of(settings: RankSettings, samples: int, *, drop_last: bool) -> Schedule:
    if samples == 0:
        raise InvalidProgram("the data set is empty")
    kind = DroppingSchedule if drop_last else Schedule
    schedule = kind(
        totals=totals_of(samples),
        batch_size=settings.batch_size,
        virtual_shards=settings.virtual_shards,
        epochs=settings.epochs,
        seed=settings.seed,
        checkpoint_every=settings.checkpoint_every,
        last_step=settings.check_steps,
    )
    if schedule.total_steps == 0:
        raise InvalidProgram(
            f"the data set has {samples} samples, fewer than a batch of {settings.batch_size}, and "
            "drop_last leaves them out: take a smaller batch_size"
        )
    return schedule


def set_generators(
    schedule: Schedule,
    step: int,
    place: int,
    own: Mapping[str, Generator] = MappingProxyType({}),
) -> None:
    """Set all generators of this process, as a function of (seed, epoch, step, place) alone.

    Those of the user also depend on their names.
    """
    epoch, _ = schedule.epoch_and_step(step)
    words = np.random.SeedSequence([schedule.seed, epoch, step, place]).generate_state(2)
    number = int(words[0]) << 32 | int(words[1])
    torch.manual_seed(number)  # of all devices
    random.seed(number)
    np.random.seed(int(words[0]))  # noqa: NPY002  what scripts and data sets use
    for name, generator in own.items():
        keys = [schedule.seed, epoch, step, place, xxh3_64_intdigest(name.encode())]
        _set(generator, np.random.SeedSequence(keys))


def _set(generator: Generator, sequence: np.random.SeedSequence) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(sequence).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(sequence.generate_state(4))
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
    else:
        generator.seed(int(sequence.generate_state(1, np.uint64)[0]))


def totals_of(samples: int) -> Totals:
    """Return the totals of a data set of so many samples, each known by its index."""
    total = 0
    for start in range(0, samples, CHUNK):
        numbers = np.arange(start, min(start + CHUNK, samples))
        total += int(_hashes(numbers).sum(dtype=np.uint64))
    return Totals(lines=samples, hash_sum=total % HASH_MODULUS)


def deal(samples: int, shards: int) -> list[tuple[int, int]]:
    """Return which of a step's samples each shard gets, as ranges ``[start, stop)``."""
    filled = min(shards, max(1, samples // SAMPLES_MIN))
    return ranges(samples, filled) + [(samples, samples)] * (shards - filled)


class ShardLoader:
    """Looks up the samples of shards; a batch is an array of their numbers."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule: Final = schedule

    def load(self, step: int, block: Block) -> BlockBatches:
        """Return the numbers of the samples of each shard in a block."""
        batches = self.numbers(step)[block.start : block.stop]
        counts = np.array([len(batch) for batch in batches], np.float32)
        hashes = np.array([_hashes(batch).sum(dtype=np.uint64) for batch in batches], np.uint64)
        return BlockBatches(
            batches=batches, weights=counts, sample_counts=encode_sample_count(counts, hashes)
        )

    def numbers(self, step: int) -> Sequence[Numbers]:
        """Return the numbers of the samples of each shard of a step."""
        schedule = self._schedule
        epoch, _ = schedule.epoch_and_step(step)
        dealt = self.sample_ranges(step)
        start, stop = dealt[0][0], dealt[-1][1]
        numbers = positions(
            schedule.totals.lines, seed=schedule.seed, epoch=epoch, start=start, stop=stop
        )
        return [numbers[first - start : end - start] for first, end in dealt]

    def sample_ranges(self, step: int) -> list[tuple[int, int]]:
        """Return which places of its epoch each shard of a step gets, as ranges."""
        _, step_in_epoch = self._schedule.epoch_and_step(step)
        start = step_in_epoch * self._schedule.batch_size
        samples = min(self._schedule.batch_size, self._schedule.totals.lines - start)
        dealt = deal(samples, self._schedule.virtual_shards)
        return [(start + first, start + last) for first, last in dealt]


class Sampler:
    """The order of each epoch, as a sampler of torch or a function of the epoch gives it."""

    def __init__(self, given: Iterable[int] | Callable[[int], Iterable[int]], seed: int) -> None:
        self._given: Final = given
        self._seed: Final = seed
        self._epoch, self._order = 0, self._draw(0)
        if not np.array_equal(self._order, self._draw(0)):
            raise InvalidProgram(
                "the sampler gives another order when it is asked for the same epoch again: give "
                "join(sampler=…) a sampler of torch, or a function that returns the order of an "
                "epoch and depends on the epoch's number alone"
            )

    def __len__(self) -> int:
        return len(self._order)

    def order(self, epoch: int) -> Numbers:
        """Return the numbers of an epoch's samples; sets the generators."""
        if epoch != self._epoch:
            order = self._draw(epoch)
            if len(order) != len(self._order):
                raise InvalidProgram(
                    f"the sampler gives {len(order)} samples in epoch {epoch} and "
                    f"{len(self._order)} in epoch 0: give as many in each"
                )
            self._epoch, self._order = epoch, order
        return self._order

    def _draw(self, epoch: int) -> Numbers:
        given, keys = self._given, [self._seed, epoch, _ORDER]
        seeds = np.random.SeedSequence(keys).generate_state(2)
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(int(seeds[0]))
        if isinstance(generator := getattr(given, "generator", None), torch.Generator):
            generator.manual_seed(int(seeds[1]))
        if hasattr(given, "set_epoch"):
            given.set_epoch(epoch)
        drawn = [*(given if isinstance(given, Iterable) else given(epoch))]
        try:
            return np.array([int(number) for number in drawn], np.int64)
        except TypeError as error:
            raise InvalidProgram(
                f"the sampler gives {drawn[0]!r}: join(sampler=…) takes one that gives the number "
                "of a sample at a time, and batch_size makes the batches"
            ) from error


def sampler_of(
    given: Iterable[int] | Callable[[int], Iterable[int]] | None, data: Dataset, seed: int
) -> Sampler | None:
    """Return the order of the user's own, None for the usual one; raises `InvalidProgram`."""
    is_stream = isinstance(data, IterableDataset)
    if is_stream or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        cure = (
            'read its shards by index, as "Streams" in docs/pytorch.md shows'
            if is_stream
            else "give a data set with len() and [index], such as the one that a DataLoader is "
            "made of"
        )
        raise InvalidProgram(f"data is of the type {type(data).__name__}: {cure}")
    if isinstance(given, DistributedSampler):
        raise InvalidProgram(
            "a DistributedSampler deals the samples out to ranks, as muster.torch.join() does: "
            "leave it out"
        )
    return None if given is None else Sampler(given, seed)


class Batches:
    """The batch of any leaf. Items and `collate` draw the random numbers of that leaf."""

    def __init__(
        self,
        schedule: Schedule,
        data: Dataset,
        collate: Callable[[list[Any]], Any],
        sampler: Sampler | None = None,
        generators: Mapping[str, Generator] = MappingProxyType({}),
    ) -> None:
        self._schedule: Final = schedule
        self._loader: Final = ShardLoader(schedule)
        self._data: Final = data
        self._collate: Final = collate
        self._sampler: Final = sampler
        self._generators: Final = generators

    def __getitem__(self, leaf: Leaf) -> Any:  # noqa: ANN401  what `collate` returns
        return self.make(leaf, self._loader.numbers(leaf.step)[leaf.shard])

    def make(self, leaf: Leaf, numbers: Numbers) -> Any:  # noqa: ANN401
        """Return the batch of a leaf, which has the samples of these numbers."""
        if self._sampler is not None:  # the numbers are then those of draws, which are counted
            start, stop = self._loader.sample_ranges(leaf.step)[leaf.shard]
            epoch, _ = self._schedule.epoch_and_step(leaf.step)
            numbers = self._sampler.order(epoch)[start:stop]
        set_generators(self._schedule, leaf.step, leaf.shard, self._generators)
        return self._collate([self._data[int(number)] for number in numbers])


class LeafSampler:
    """The leaves that a rank computes if it gets the same shards in every step."""

    def __init__(self, schedule: Schedule) -> None:
        self._steps: Final = schedule.total_steps
        self._loader: Final = ShardLoader(schedule)
        self.first_step = 0
        self.shards: Sequence[int] = ()

    def __iter__(self) -> Iterator[Leaf]:
        for step in range(self.first_step, self._steps):
            dealt = self._loader.sample_ranges(step)
            yield from (
                Leaf(step, shard) for shard in self.shards if dealt[shard][0] < dealt[shard][1]
            )


class Prefetcher:
    """Reads batches that worker processes have made ahead.

    They go on with the shards of this rank's last step. When the shards are dealt anew, this
    process makes the batches itself until the next step begins.
    """

    def __init__(self, batches: Batches, workers: int, schedule: Schedule) -> None:
        self._batches: Final = batches
        self._sampler: Final = LeafSampler(schedule)
        self._loader: Final = DataLoader(
            batches,
            batch_size=None,
            sampler=self._sampler,
            num_workers=workers,
            collate_fn=_unchanged,
            persistent_workers=True,
            # Python's default start method would run the script again from 3.14 on.
            multiprocessing_context="fork",
        )
        self._step = -1
        self._shards: list[int] = []
        """Those of `_step` that have been read."""
        self._prefetched: tuple[Iterator[Leaf], Iterator[Any]] | None = None
        """The next leaves, and their batches."""

    def read(self, leaf: Leaf, numbers: Numbers) -> Any:  # noqa: ANN401  what `collate` returns
        if leaf.step != self._step:
            if self._prefetched is None and self._shards:
                self._sampler.first_step, self._sampler.shards = leaf.step, self._shards
                self._prefetched = iter(self._sampler), iter(self._loader)
            self._step, self._shards = leaf.step, []
        self._shards.append(leaf.shard)
        if self._prefetched is not None:
            leaves, batches = self._prefetched
            if next(leaves, None) == leaf:
                return next(batches)
            self._prefetched = None
        return self._batches.make(leaf, numbers)


def aligned(batch: Any) -> Any:  # noqa: ANN401  what `collate` returns
    """Return a batch whose floating tensors begin at multiples of a cache line.

    A product of few rows has other bits where its input lies otherwise, such as in a slice.
    """
    if isinstance(batch, torch.Tensor):
        is_plain = batch.layout is torch.strided and batch.is_floating_point()
        return batch.clone() if is_plain and batch.data_ptr() % ALIGNMENT else batch
    if isinstance(batch, MutableMapping):
        found = {key: aligned(value) for key, value in batch.items()}
        if all(found[key] is value for key, value in batch.items()):
            return batch
        batch = copy.copy(batch)  # keeps its type, as torch's collate does
        batch.update(found)
    elif isinstance(batch, list | tuple):
        items = [aligned(value) for value in batch]
        if any(item is not given for item, given in zip(items, batch, strict=True)):
            kind = type(batch)
            return kind(*items) if hasattr(batch, "_fields") else kind(items)
    return batch


def _unchanged(batch: Any) -> Any:  # noqa: ANN401
    return batch


def _hashes(numbers: Numbers) -> NDArray[np.uint64]:
    """Return a hash of each number: SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
