"""What a block reads is what its leaves read by themselves."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from muster.collectives.reduction.tree import Block
from muster.datasets.errors import InvalidSample
from muster.datasets.index import Line
from muster.datasets.random_access import RandomAccess
from muster.datasets.sources import open_source
from muster.training.batches import BatchLoader, BlockBatches, decode_lines, decoder_of
from muster.training.sample_count import decode_sample_count
from muster.training.schedule import Schedule
from tests.support.stage import write_samples
from tests.support.virtual_shards import consumed, positions_of_shard, shard_samples

SAMPLES = 150
SHARDS = 8
BATCH = 32


@pytest.fixture(scope="module")
def drawer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RandomAccess]:
    directory: Path = tmp_path_factory.mktemp("data")
    with RandomAccess(open_source(write_samples(directory, SAMPLES))) as drawer:
        yield drawer


@pytest.fixture
def schedule(drawer: RandomAccess) -> Schedule:
    return Schedule(
        totals=drawer.totals,
        batch_size=BATCH,
        virtual_shards=SHARDS,
        epochs=2,
        seed=3,
        checkpoint_every=1,
    )


@pytest.fixture
def loader(schedule: Schedule, drawer: RandomAccess) -> BatchLoader:
    return BatchLoader(schedule, drawer, bytes)


ROOT = Block(3, 0)


@pytest.mark.parametrize("step", [7, 0, 4, 9])
def test_leaf_reads_its_places_of_the_epoch(
    step: int, loader: BatchLoader, schedule: Schedule, drawer: RandomAccess
) -> None:
    epoch, step_in_epoch = schedule.epoch_and_step(step)
    loaded = loader.load(step, ROOT)
    for shard, batch in enumerate(loaded.batches):
        part = shard_samples(
            step_in_epoch, shard, batch_size=BATCH, virtual_shards=SHARDS, samples=SAMPLES
        )
        numbers = positions_of_shard(part, SAMPLES, seed=3, epoch=epoch)[: part.real]
        lines = drawer.draw(numbers)
        assert batch.samples[: part.real] == [line.content for line in lines]
        assert batch.weights.tolist() == part.weights.tolist()
        assert loaded.weights[shard] == part.real
        assert decode_sample_count(loaded.sample_counts[shard]) == consumed(lines)


@pytest.mark.parametrize("step", [0, 4, 9])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_halves_of_a_block_read_its_parts(step: int, level: int, loader: BatchLoader) -> None:
    whole = loader.load(step, ROOT)
    parts = [loader.load(step, Block(level, number)) for number in range(SHARDS >> level)]
    assert contents(whole) == [row for part in parts for row in contents(part)]


def test_last_step_is_padded_without_weight(loader: BatchLoader) -> None:
    last = loader.load(4, ROOT)  # 150 = 4 · 32 + 22: five leaves are full, one half full
    assert last.weights.tolist() == [4, 4, 4, 4, 4, 2, 0, 0]
    half = last.batches[5]
    assert half.samples[2:] == [half.samples[0]] * 2
    assert len(set(last.batches[6].samples + last.batches[7].samples)) == 1


def test_order_of_the_steps_does_not_matter(loader: BatchLoader) -> None:
    forwards = [contents(loader.load(step, ROOT)) for step in range(10)]
    backwards = [contents(loader.load(step, ROOT)) for step in reversed(range(10))]
    assert forwards == backwards[::-1]


def contents(loaded: BlockBatches) -> list[tuple[object, ...]]:
    return [
        (list(batch.samples), batch.weights.tolist(), float(weight), np.array(tally).tolist())
        for batch, weight, tally in zip(
            loaded.batches, loaded.weights, loaded.sample_counts, strict=True
        )
    ]


SHARD = Path("data/shard_00000.txt")


class WithoutDecode:
    """As much of a program as these tests look at."""


class WithDecode:
    def decode(self, line: bytes) -> float:
        return float(line)


def lines(*contents: bytes) -> list[Line]:
    return [Line(content, SHARD, number) for number, content in enumerate(contents, start=7)]


def test_line_is_json_unless_the_program_decodes_it() -> None:
    assert decode_lines(lines(b'{"x":[1]}', b"2"), decoder_of(WithoutDecode())) == [{"x": [1]}, 2]
    assert decode_lines(lines(b"0.5", b"2"), decoder_of(WithDecode())) == [0.5, 2.0]


@pytest.mark.parametrize(
    ("program", "problem"),
    [(WithoutDecode(), "malformed"), (WithDecode(), "ValueError: could not convert")],
)
def test_undecodable_line_is_named(program: object, problem: str) -> None:
    with pytest.raises(InvalidSample, match=problem) as caught:
        decode_lines(lines(b"1", b"one"), decoder_of(program))
    assert str(caught.value).startswith(f"{SHARD}:8: no sample, ")
    assert caught.value.__cause__ is not None, "the program's own traceback is kept"
