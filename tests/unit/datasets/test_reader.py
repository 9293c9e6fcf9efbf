import tracemalloc
from itertools import islice
from pathlib import Path

import pytest

from muster.contracts.position import Position
from muster.datasets.errors import InvalidSample, ShardChanged, ShardUnreadable
from muster.datasets.index import ShardIndex, index_beside, totals_of
from muster.datasets.lines import line_hash
from muster.datasets.reader import read_lines

START = Position()
CONTENTS = [
    b"a\nb\nc\n",  # ends with a newline
    b"",  # empty in the middle
    b"d\r\ne\r\nf",  # carriage returns, and no newline at the end
    b"\xff\xfe\n" + b"g" * 1000 + b"\n",  # no UTF-8
    b"",  # empty at the end
]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write(tmp_path, *CONTENTS)


def write(directory: Path, *contents: bytes) -> list[Path]:
    paths = [directory / f"shard_{number:05d}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def at(shard_idx: int, line_idx: int) -> Position:
    return Position(shard_idx=shard_idx, line_idx=line_idx)


def test_every_line_comes_once_with_the_position_after_it(shards: list[Path]) -> None:
    assert list(read_lines(shards, START)) == [
        (b"a", 0, 1),
        (b"b", 0, 2),
        (b"c", 0, 3),
        (b"d\r", 2, 1),
        (b"e\r", 2, 2),
        (b"f", 2, 3),
        (b"\xff\xfe", 3, 1),
        (b"g" * 1000, 3, 2),
    ]


def test_from_every_position_exactly_the_rest_is_read(shards: list[Path]) -> None:
    everything = list(read_lines(shards, START))
    for number, (_, shard_idx, line_idx) in enumerate(everything, start=1):
        assert list(read_lines(shards, at(shard_idx, line_idx))) == everything[number:]
    for shard_idx in range(len(shards) + 1):
        rest = [entry for entry in everything if entry[1] >= shard_idx]
        assert list(read_lines(shards, at(shard_idx, 0))) == rest


def test_a_rank_without_shards_has_nothing_to_do() -> None:
    assert list(read_lines([], START)) == []


def test_what_is_read_adds_up_to_the_index(shards: list[Path]) -> None:
    lines = [line for line, _, _ in read_lines(shards, START)]
    totals = totals_of(shards)
    assert totals.lines == len(lines)
    assert totals.hash_sum == sum(map(line_hash, lines)) % 2**64


def test_no_index_is_needed_to_begin_at_a_beginning(shards: list[Path]) -> None:
    list(read_lines(shards, at(1, 0)))
    assert not any(index_beside(shard).exists() for shard in shards)


@pytest.mark.parametrize("blank", [b"", b"\r"])
def test_a_blank_line_is_named_after_all_lines_before_it_were_read(
    tmp_path: Path, blank: bytes
) -> None:
    shards = write(tmp_path, b"a\nb\n" + blank + b"\nc\n")
    reading = read_lines(shards, START)
    assert list(islice(reading, 2)) == [(b"a", 0, 1), (b"b", 0, 2)]
    with pytest.raises(InvalidSample, match=r"shard_00000.txt:3: the line is blank") as caught:
        next(reading)
    assert caught.value.line_number == 3
    with pytest.raises(InvalidSample, match=r"shard_00000.txt:3:"):
        list(read_lines(shards, at(0, 2)))


def test_a_shard_with_fewer_lines_than_were_consumed_has_changed(shards: list[Path]) -> None:
    ShardIndex.open(shards[0])
    shards[0].write_bytes(b"a\n")
    with pytest.raises(ShardChanged, match="has 1 lines, but 3 of them were already consumed"):
        list(read_lines(shards, at(0, 3)))


def test_a_shard_that_is_gone_is_reported_when_the_reading_gets_there(shards: list[Path]) -> None:
    shards[2].unlink()
    reading = read_lines(shards, START)
    assert len(list(islice(reading, 3))) == 3
    with pytest.raises(ShardUnreadable, match=r"shard_00002.txt cannot be read"):
        next(reading)


@pytest.mark.parametrize("position", [at(6, 0), at(5, 1)])
def test_a_position_behind_the_last_shard_is_refused(
    shards: list[Path], position: Position
) -> None:
    with pytest.raises(ShardChanged, match="lost shards"):
        list(read_lines(shards, position))


@pytest.mark.slow
def test_reading_takes_no_memory_in_proportion_to_the_shard(tmp_path: Path) -> None:
    shards = write(tmp_path, (b"x" * 999 + b"\n") * 50_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_lines(shards, START)) == 50_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3_000_000
