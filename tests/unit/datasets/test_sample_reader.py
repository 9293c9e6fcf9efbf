from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from muster.contracts.shards import Position
from muster.datasets.errors import InvalidSample
from muster.datasets.index import line_hash
from muster.datasets.reader import SampleReader
from muster.datasets.source import DataSource
from muster.datasets.sources import open_source
from tests.support.ranks import write_shards

ANYTHING = msgspec.json.Decoder()
EPOCHS = 2
SIZES = [1, 2, 3, 100]


@pytest.fixture
def source(tmp_path: Path) -> DataSource:
    return open_source(write_shards(tmp_path, [0, 1, 2, 3, 4], [], [5], [6, 7]))


def reader_of(source: DataSource, epochs: int = EPOCHS) -> SampleReader:
    return SampleReader(lambda: source, epochs)


def steps(reader: SampleReader, size: int) -> Iterator[tuple[list[int], Position]]:
    """Take a step with each batch; yield what it used and where it left the data."""
    for batch in reader.batches(size, ANYTHING):
        reader.commit()
        yield batch, reader.committed


@pytest.mark.parametrize("size", SIZES)
def test_every_sample_comes_once_and_batches_end_with_epochs(source: DataSource, size: int) -> None:
    batches = [batch for batch, _ in steps(reader_of(source), size)]
    samples = list(range(8))
    one_pass = [samples[start : start + size] for start in range(0, 8, size)]
    assert batches == one_pass * EPOCHS


@pytest.mark.parametrize("size", SIZES)
def test_run_resumed_at_any_step_is_the_same(source: DataSource, size: int) -> None:
    whole = list(steps(reader_of(source), size))
    for done, (_, position) in enumerate(whole, start=1):
        resumed = reader_of(source)
        resumed.go_to(position)
        assert list(steps(resumed, size)) == whole[done:]


def test_uncommitted_samples_come_again(source: DataSource) -> None:
    reader = reader_of(source)
    batches = reader.batches(2, ANYTHING)
    assert next(batches) == [0, 1]
    reader.commit()
    assert next(batches) == [2, 3]
    assert reader.committed.consumed == 2
    batches = reader.batches(2, ANYTHING)
    assert [next(batches), next(batches)] == [[2, 3], [4, 5]]
    reader.commit()
    assert (reader.committed.step, reader.committed.consumed) == (2, 6), "all since the last step"


def test_consumed_hash_adds_up_over_an_epoch(source: DataSource) -> None:
    positions = [position for _, position in steps(reader_of(source), 3)]
    hashes = [line_hash(b"%d" % sample) for sample in range(8)]
    end_of_pass = positions[2]
    assert (end_of_pass.epoch, end_of_pass.consumed) == (0, 8)
    assert end_of_pass.consumed_hash == sum(hashes) % 2**64
    beginning = positions[3]
    assert (beginning.epoch, beginning.consumed) == (1, 3), "each pass is counted by itself"
    assert beginning.consumed_hash == sum(hashes[:3]) % 2**64
    assert all(0 <= position.consumed_hash < 2**64 for position in positions)


def test_shards_are_found_on_first_read() -> None:
    def fail() -> DataSource:
        raise AssertionError

    reader = SampleReader(fail, 1)
    reader.go_to(Position(step=3))
    reader.batches(1, ANYTHING)
    reader.commit()
    assert reader.committed.step == 4


def test_more_epochs_can_follow(source: DataSource) -> None:
    *_, (_, end) = steps(reader_of(source, epochs=1), 8)
    resumed = reader_of(source, epochs=2)
    resumed.go_to(end)
    assert list(resumed.batches(8, ANYTHING)) == [list(range(8))]


@pytest.mark.parametrize("size", [0, -1])
def test_batch_size_zero_is_refused(source: DataSource, size: int) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        next(reader_of(source).batches(size, ANYTHING))


def test_invalid_sample_keeps_earlier_commits(tmp_path: Path) -> None:
    write_shards(tmp_path, [0, 1])
    with (tmp_path / "shard_00000.txt").open("ab") as shard:
        shard.write(b"{half\n")
    reader = reader_of(open_source(tmp_path))
    batches = reader.batches(2, ANYTHING)
    assert next(batches) == [0, 1]
    reader.commit()
    with pytest.raises(InvalidSample, match=r"shard_00000.txt:3"):
        next(batches)
    assert reader.committed.line_idx == 2
