import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muster.contracts.shards import Position
from muster.datasets import random_access
from muster.datasets.errors import InvalidSample, ShardChanged, ShardUnreadable
from muster.datasets.index import Line, ShardIndex, index_beside
from muster.datasets.random_access import RandomAccess
from muster.datasets.reader import read_lines
from muster.datasets.sources import open_source
from tests.support.ranks import write_contents
from tests.support.virtual_shards import consumed


def numbers(*wanted: int) -> np.ndarray:
    return np.array(wanted, np.int64)


def all_lines(shards: list[Path]) -> list[Line]:
    """Return every line, found by reading all of them one after another."""
    return [
        Line(line, shards[shard_idx], number)
        for line, shard_idx, number in read_lines(open_source(shards[0].parent), Position())
    ]


def test_lines_come_in_the_requested_order(shards: list[Path]) -> None:
    expected = all_lines(shards)
    wanted = [7, 0, 3, 3, 6, 0, 1, 2, 5, 4]
    with RandomAccess(open_source(shards[0].parent)) as access:
        assert access.draw(numbers(*wanted)) == [expected[number] for number in wanted]
        assert access.draw(numbers()) == []


@pytest.mark.parametrize("number", [-1, 8])
def test_line_number_out_of_range_is_refused(shards: list[Path], number: int) -> None:
    with (
        RandomAccess(open_source(shards[0].parent)) as access,
        pytest.raises(IndexError, match="must be in"),
    ):
        access.draw(numbers(0, number))


def test_one_pass_adds_up_to_the_totals(shards: list[Path]) -> None:
    with RandomAccess(open_source(shards[0].parent)) as access:
        shuffled = np.random.default_rng(0).permutation(8)
        assert consumed(access.draw(shuffled)) == access.totals
        assert consumed(access.draw(shuffled[1:])) != access.totals
        assert consumed([]).lines == consumed([]).hash_sum == 0


def test_blank_line_is_refused_by_number(tmp_path: Path) -> None:
    shards = write_contents(tmp_path, b"a\n", b"b\n0\nc\n")
    facts = shards[1].stat()
    ShardIndex.open(shards[1])
    shards[1].write_bytes(b"b\n\r\nc\n")  # an earlier version indexed it like that
    os.utime(shards[1], ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with RandomAccess(open_source(shards[0].parent)) as access:
        with pytest.raises(InvalidSample, match=r"shard_00001.txt:2: the line is blank"):
            access.draw(numbers(0, 2))
        assert [line.content for line in access.draw(numbers(3, 1))] == [b"c", b"b"]


def rewrite_in_place(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes().upper() + b"0\n")


def cut(shard: Path) -> None:
    os.truncate(shard, 1)


def replace(shard: Path) -> None:
    other = shard.with_name("other")
    other.write_bytes(b"x\ny\nz\n")
    other.replace(shard)


def replace_and_index(shard: Path) -> None:
    replace(shard)
    ShardIndex.open(shard)


@pytest.mark.parametrize(
    ("change", "was_open"),
    [
        (rewrite_in_place, True),
        (cut, True),
        (rewrite_in_place, False),
        (cut, False),
        (replace, False),
        (replace_and_index, False),
    ],
)
def test_changed_shard_is_refused(
    shards: list[Path], change: Callable[[Path], None], *, was_open: bool
) -> None:
    with RandomAccess(open_source(shards[0].parent)) as access:
        if was_open:
            access.draw(numbers(1))
        change(shards[1])
        with pytest.raises(ShardChanged, match=r"shard_00001.txt"):
            access.draw(numbers(5, 1))


def test_open_shard_survives_removal(shards: list[Path]) -> None:
    with RandomAccess(open_source(shards[0].parent)) as access:
        access.draw(numbers(0))
        replace_and_index(shards[1])
        assert [line.content for line in access.draw(numbers(0, 1, 2))] == [b"a", b"b", b"c"]


def test_missing_shard_is_refused_when_needed(shards: list[Path]) -> None:
    with RandomAccess(open_source(shards[0].parent)) as access:
        shards[4].unlink()
        assert access.draw(numbers(0))[0].content == b"a"
        with pytest.raises(ShardUnreadable, match=r"shard_00004.txt cannot be read"):
            access.draw(numbers(0, 3))


@pytest.mark.parametrize("damage", [1, -2])
def test_index_offset_inside_a_line_is_detected(tmp_path: Path, damage: int) -> None:
    shards = write_contents(tmp_path, b"aaa\nbbb\nccc\n")
    with RandomAccess(open_source(shards[0].parent)) as access:
        place = index_beside(shards[0])
        content = bytearray(place.read_bytes())
        content[-16] += damage
        place.write_bytes(content)
        for number in (0, 1):
            with pytest.raises(ShardChanged, match=r"has no line . at the offset"):
                access.draw(numbers(number))
        assert access.draw(numbers(2))[0].content == b"ccc"


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_number_of_open_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_access, "OPEN_SHARDS", 3)
    shards = write_contents(tmp_path, *(b"%d\n" % number for number in range(20)))
    before = open_files()
    with RandomAccess(open_source(shards[0].parent)) as access:
        for _ in range(2):
            lines = access.draw(np.arange(20)[::-1])
            assert [int(line.content) for line in lines] == list(range(20))[::-1]
            assert open_files() == before + 2 * 3
    assert open_files() == before
    access.close()


def test_random_access_memory_is_bounded(tmp_path: Path) -> None:
    shards = write_contents(tmp_path, b"x\n" * 200_000)
    with RandomAccess(open_source(shards[0].parent)) as access:
        access.draw(np.arange(64))  # writes the index, and imports what is imported late
    tracemalloc.start()
    try:
        with RandomAccess(open_source(shards[0].parent)) as access:
            for start in range(0, 200_000, 10_000):
                access.draw(np.arange(start, start + 64))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200_000
