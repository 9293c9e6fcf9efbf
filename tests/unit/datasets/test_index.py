import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.contracts.position import HASH_MODULUS
from muster.datasets.errors import DatasetNotWritable, ShardChanged
from muster.datasets.index import ShardIndex, index_beside, totals_of
from muster.datasets.lines import line_hash

LINES = [b"first", b"", b"with a return\r", b"\xff\x00", b"x" * 300_000, b"last"]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "shard_00000.txt"
    path.parent.mkdir()
    path.write_bytes(b"\n".join(LINES))
    return path


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def hash_sum(lines: list[bytes]) -> int:
    return sum(line_hash(line) for line in lines) % HASH_MODULUS


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_an_index_counts_sums_and_finds_every_line(shard: Path, end: bytes) -> None:
    content = b"\n".join(LINES) + end
    shard.write_bytes(content)
    index = ShardIndex.open(shard)
    assert (index.lines, index.hash_sum) == (len(LINES), hash_sum(LINES))
    for line_idx, line in enumerate(LINES):
        assert content[index.offset(line_idx) :].startswith(line)
        assert index.offset(line_idx) == len(b"".join(LINES[:line_idx])) + line_idx
    assert index.offset(len(LINES)) == len(content)
    with pytest.raises(IndexError):
        index.offset(len(LINES) + 1)


def test_the_index_of_an_empty_shard_is_empty(shard: Path) -> None:
    shard.write_bytes(b"")
    index = ShardIndex.open(shard)
    assert (index.lines, index.hash_sum, index.offset(0)) == (0, 0, 0)


def test_the_hash_is_xxh3_for_ever() -> None:
    assert line_hash(b'{"x":[0.5],"y":1}') == 0x90D5DEE51B626EBF


def test_an_index_is_built_once(shard: Path) -> None:
    built = ShardIndex.open(shard)
    before = written(index_beside(shard))
    assert ShardIndex.open(shard) == built
    assert written(index_beside(shard)) == before


def written(path: Path) -> tuple[int, int]:
    """Return which file it is and when it was written; reading it changes neither."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def test_nothing_but_the_index_is_left_beside_the_shard(shard: Path) -> None:
    ShardIndex.open(shard)
    assert names_in(shard.parent) == ["shard_00000.idx", "shard_00000.txt"]


def change_the_size(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes() + b"\nmore")


def change_the_time(shard: Path) -> None:
    os.utime(shard, ns=(0, 0))


def cut_the_index(shard: Path) -> None:
    place = index_beside(shard)
    place.write_bytes(place.read_bytes()[:-8])


def cut_the_header(shard: Path) -> None:
    index_beside(shard).write_bytes(b"MUS")


def overwrite_the_index(shard: Path) -> None:
    index_beside(shard).write_bytes(b"something else that is longer than a header is")


@pytest.mark.parametrize(
    "spoil",
    [change_the_size, change_the_time, cut_the_index, cut_the_header, overwrite_the_index],
)
def test_a_stale_or_damaged_index_is_replaced(shard: Path, spoil: Callable[[Path], None]) -> None:
    ShardIndex.open(shard)
    spoil(shard)
    lines = shard.read_bytes().split(b"\n")
    index = ShardIndex.open(shard)
    assert (index.lines, index.hash_sum) == (len(lines), hash_sum(lines))
    assert index.place == index_beside(shard)
    assert index.offset(1) == len(LINES[0]) + 1


def test_an_index_held_while_another_content_is_indexed_refuses_to_answer(shard: Path) -> None:
    held = ShardIndex.open(shard)
    shard.write_bytes(b"a\nb\nc\nd\ne\nf")
    ShardIndex.open(shard)
    with pytest.raises(ShardChanged, match="indexed anew"):
        held.offset(1)


def test_where_the_data_set_cannot_be_written_the_index_goes_to_a_private_place(
    shard: Path, tmp_path: Path
) -> None:
    # A directory in its place stops even root, whom permissions do not.
    index_beside(shard).mkdir()
    private = tmp_path / "private"
    index = ShardIndex.open(shard, private)
    assert (index.lines, index.offset(1)) == (len(LINES), len(LINES[0]) + 1)
    assert index.place.parent == private
    assert private.stat().st_mode & 0o777 == 0o700
    before = index.place.stat()
    assert ShardIndex.open(shard, private) == index
    assert index.place.stat() == before, "it is built once there, too"
    assert names_in(shard.parent) == ["shard_00000.idx", "shard_00000.txt"]


def test_a_private_place_that_others_may_write_to_is_refused(shard: Path, tmp_path: Path) -> None:
    index_beside(shard).mkdir()
    private = tmp_path / "private"
    private.mkdir()
    private.chmod(0o777)
    with pytest.raises(DatasetNotWritable, match="TMPDIR"):
        ShardIndex.open(shard, private)
    assert names_in(private) == []


def test_totals_add_up_over_shards(shard: Path) -> None:
    other = shard.with_name("shard_00001.txt")
    other.write_bytes(b"a\nb\n")
    totals = totals_of([shard, other])
    assert totals.lines == len(LINES) + 2
    assert totals.hash_sum == hash_sum([*LINES, b"a", b"b"])


@pytest.mark.slow
def test_building_takes_no_memory_in_proportion_to_the_shard(shard: Path) -> None:
    shard.write_bytes((b"x" * 999 + b"\n") * 50_000)
    tracemalloc.start()
    try:
        assert ShardIndex.open(shard).lines == 50_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4_000_000
