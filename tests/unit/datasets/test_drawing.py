import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from virtual_shards import consumed

from muster.contracts.position import Position
from muster.datasets import drawing
from muster.datasets.drawing import Drawer
from muster.datasets.errors import InvalidSample, ShardChanged, ShardUnreadable
from muster.datasets.index import ShardIndex, index_beside, totals_of
from muster.datasets.lines import Line
from muster.datasets.reader import read_lines

CONTENTS = [
    b"",  # empty at the beginning
    b"a\nb\nc\n",  # ends with a newline
    b"",
    b"",  # empty in the middle
    b"d\r\ne\r\nf",  # carriage returns, and no newline at the end
    b"\xff\xfe\n" + b"g" * 1000 + b"\n",  # no UTF-8
    b"",  # empty at the end
]


def write(directory: Path, *contents: bytes) -> list[Path]:
    paths = [directory / f"shard_{number:05d}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write(tmp_path, *CONTENTS)


def numbers(*wanted: int) -> np.ndarray:
    return np.array(wanted, np.int64)


def all_lines(shards: list[Path]) -> list[Line]:
    """Return every line, found by reading all of them one after another."""
    return [
        Line(line, shards[shard_idx], number)
        for line, shard_idx, number in read_lines(shards, Position())
    ]


def test_every_line_is_drawn_by_its_number(shards: list[Path]) -> None:
    expected = all_lines(shards)
    with Drawer(shards) as drawer:
        for number, line in enumerate(expected):
            assert drawer.draw(numbers(number)) == [line]


def test_lines_come_in_the_order_they_were_asked_for(shards: list[Path]) -> None:
    expected = all_lines(shards)
    wanted = [7, 0, 3, 3, 6, 0, 1]
    with Drawer(shards) as drawer:
        assert drawer.draw(numbers(*wanted)) == [expected[number] for number in wanted]
        assert drawer.draw(numbers()) == []


@pytest.mark.parametrize("number", [-1, 8])
def test_a_number_that_no_line_has_is_refused(shards: list[Path], number: int) -> None:
    with Drawer(shards) as drawer, pytest.raises(IndexError, match="lines 0 to 7"):
        drawer.draw(numbers(0, number))


def test_one_pass_over_all_numbers_consumes_the_totals(shards: list[Path]) -> None:
    with Drawer(shards) as drawer:
        shuffled = np.random.default_rng(0).permutation(8)
        assert consumed(drawer.draw(shuffled)) == drawer.totals == totals_of(shards)
        assert consumed(drawer.draw(shuffled[1:])) != drawer.totals
        assert consumed([]).lines == consumed([]).hash_sum == 0


@pytest.mark.parametrize("blank", [b"", b"\r"])
def test_a_blank_line_is_named(tmp_path: Path, blank: bytes) -> None:
    shards = write(tmp_path, b"a\n", b"b\n" + blank + b"\nc\n")
    with Drawer(shards) as drawer:
        with pytest.raises(InvalidSample, match=r"shard_00001.txt:2: the line is blank"):
            drawer.draw(numbers(0, 2))
        assert [line.content for line in drawer.draw(numbers(3, 1))] == [b"c", b"b"]


def rewrite_in_place(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes().upper() + b"\n")


def cut(shard: Path) -> None:
    os.truncate(shard, 1)


@pytest.mark.parametrize("change", [rewrite_in_place, cut])
def test_a_shard_that_changes_while_it_is_open_is_refused(
    shards: list[Path], change: Callable[[Path], None]
) -> None:
    with Drawer(shards) as drawer:
        drawer.draw(numbers(1))
        change(shards[1])
        with pytest.raises(ShardChanged, match=r"shard_00001.txt changed while it was"):
            drawer.draw(numbers(5, 1))


def replace(shard: Path) -> None:
    other = shard.with_name("other")
    other.write_bytes(b"x\ny\nz\n")
    other.replace(shard)


def replace_and_index(shard: Path) -> None:
    replace(shard)
    ShardIndex.open(shard)


@pytest.mark.parametrize("change", [rewrite_in_place, cut, replace, replace_and_index])
def test_a_shard_that_changed_before_it_is_opened_is_refused(
    shards: list[Path], change: Callable[[Path], None]
) -> None:
    with Drawer(shards) as drawer:
        change(shards[1])
        with pytest.raises(ShardChanged, match=r"shard_00001.txt"):
            drawer.draw(numbers(1))


def test_a_shard_that_is_open_outlives_its_name(shards: list[Path]) -> None:
    with Drawer(shards) as drawer:
        drawer.draw(numbers(0))
        replace_and_index(shards[1])
        assert [line.content for line in drawer.draw(numbers(0, 1, 2))] == [b"a", b"b", b"c"]


def test_a_shard_that_is_gone_is_refused_when_it_is_needed(shards: list[Path]) -> None:
    with Drawer(shards) as drawer:
        shards[4].unlink()
        assert drawer.draw(numbers(0))[0].content == b"a"
        with pytest.raises(ShardUnreadable, match=r"shard_00004.txt cannot be read"):
            drawer.draw(numbers(0, 3))


@pytest.mark.parametrize("damage", [1, -2])
def test_an_index_that_points_between_the_lines_is_found_out(tmp_path: Path, damage: int) -> None:
    shards = write(tmp_path, b"aaa\nbbb\nccc\n")
    with Drawer(shards) as drawer:
        place = index_beside(shards[0])
        content = bytearray(place.read_bytes())
        content[-16] += damage
        place.write_bytes(content)
        for number in (0, 1):
            with pytest.raises(ShardChanged, match=r"has no line . where its index says"):
                drawer.draw(numbers(number))
        assert drawer.draw(numbers(2))[0].content == b"ccc"


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_no_more_files_are_kept_open_than_a_process_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "OPEN_SHARDS", 3)
    shards = write(tmp_path, *(b"%d\n" % number for number in range(20)))
    before = open_files()
    with Drawer(shards) as drawer:
        for _ in range(2):
            lines = drawer.draw(np.arange(20)[::-1])
            assert [int(line.content) for line in lines] == list(range(20))[::-1]
            assert open_files() == before + 2 * 3
    assert open_files() == before
    drawer.close()


def test_drawing_takes_no_memory_in_proportion_to_the_data(tmp_path: Path) -> None:
    shards = write(tmp_path, b"x\n" * 200_000)
    ShardIndex.open(shards[0])
    tracemalloc.start()
    try:
        with Drawer(shards) as drawer:
            for start in range(0, 200_000, 10_000):
                drawer.draw(np.arange(start, start + 64))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200_000
