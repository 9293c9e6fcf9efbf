import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.contracts.shards import HASH_MODULUS
from muster.datasets import index
from muster.datasets.errors import DatasetNotWritable, InvalidSample, ShardChanged, ShardUnreadable
from muster.datasets.index import (
    ShardIndex,
    blocks_of_shard,
    fingerprint_of,
    index_beside,
    line_hash,
)

LINES = [b"first", b" ", b"with a return\r", b"\xff\x00", b"x" * 300_000, b"last"]


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
def test_index_counts_sums_and_finds_lines(shard: Path, end: bytes) -> None:
    content = b"\n".join(LINES) + end
    shard.write_bytes(content)
    index = ShardIndex.open(shard)
    assert (index.totals.lines, index.totals.hash_sum) == (len(LINES), hash_sum(LINES))
    for line_idx, line in enumerate(LINES):
        assert content[index.offset(line_idx) :].startswith(line)
        assert index.offset(line_idx) == len(b"".join(LINES[:line_idx])) + line_idx
    assert index.offset(len(LINES)) == len(content)
    with pytest.raises(IndexError):
        index.offset(len(LINES) + 1)


@pytest.mark.parametrize("blank", [b"", b"\r"])
def test_a_shard_with_a_blank_line_gets_no_index(shard: Path, blank: bytes) -> None:
    shard.write_bytes(b"first\n" * 100_000 + blank + b"\nlast\n")
    with pytest.raises(InvalidSample, match=r"^s3:/there:100001: the line is blank"):
        ShardIndex.open(shard, shown=Path("s3:/there"))
    assert names_in(shard.parent) == ["shard_00000.txt"]


def test_line_hash_never_changes() -> None:
    assert line_hash(b'{"x":[0.5],"y":1}') == 0x90D5DEE51B626EBF


def test_index_is_built_once(shard: Path) -> None:
    built = ShardIndex.open(shard)
    assert names_in(shard.parent) == ["shard_00000.idx", "shard_00000.txt"]
    before = written(index_beside(shard))
    assert ShardIndex.open(shard) == built
    assert written(index_beside(shard)) == before


def written(path: Path) -> tuple[int, int]:
    """Return which file it is and when it was written; reading it changes neither."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def change_index(content: bytes | slice) -> Callable[[Path], None]:
    def change(shard: Path) -> None:
        place = index_beside(shard)
        kept = place.read_bytes()[content] if isinstance(content, slice) else content
        place.write_bytes(kept)

    return change


SPOILS: dict[str, Callable[[Path], object]] = {
    "another size": lambda shard: shard.write_bytes(shard.read_bytes() + b"\nmore"),
    "another time": lambda shard: os.utime(shard, ns=(0, 0)),
    "an index cut short": change_index(slice(-8)),
    "half a header": change_index(b"MUS"),
    "something else": change_index(b"something else that is longer than a header is"),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=list(SPOILS))
def test_stale_or_damaged_index_is_rebuilt(shard: Path, spoil: Callable[[Path], None]) -> None:
    ShardIndex.open(shard)
    spoil(shard)
    lines = shard.read_bytes().split(b"\n")
    index = ShardIndex.open(shard)
    assert (index.totals.lines, index.totals.hash_sum) == (len(lines), hash_sum(lines))
    assert index.place == index_beside(shard)
    assert index.offset(1) == len(LINES[0]) + 1


def test_replaced_index_refuses_look_ups(shard: Path) -> None:
    held = ShardIndex.open(shard)
    shard.write_bytes(b"a\nb\nc\nd\ne\nf")
    ShardIndex.open(shard)
    with pytest.raises(ShardChanged, match="indexed again"):
        held.offset(1)


def test_read_only_data_set_gets_a_private_index(shard: Path, tmp_path: Path) -> None:
    # A directory in its place stops even root, whom permissions do not.
    index_beside(shard).mkdir()
    private = tmp_path / "private"
    index = ShardIndex.open(shard, private)
    assert (index.totals.lines, index.offset(1)) == (len(LINES), len(LINES[0]) + 1)
    assert index.place.parent == private
    assert private.stat().st_mode & 0o777 == 0o700
    before = index.place.stat()
    assert ShardIndex.open(shard, private) == index
    assert index.place.stat() == before, "it is built once there, too"
    assert names_in(shard.parent) == ["shard_00000.idx", "shard_00000.txt"]


def test_shared_private_directory_is_refused(shard: Path, tmp_path: Path) -> None:
    index_beside(shard).mkdir()
    private = tmp_path / "private"
    private.mkdir()
    private.chmod(0o777)
    with pytest.raises(DatasetNotWritable, match="TMPDIR"):
        ShardIndex.open(shard, private)
    assert names_in(private) == []


@pytest.mark.slow
def test_index_memory_is_bounded(shard: Path) -> None:
    shard.write_bytes((b"x" * 999 + b"\n") * 50_000)
    tracemalloc.start()
    try:
        assert ShardIndex.open(shard).totals.lines == 50_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4_000_000


CONTENTS = {
    b"": [],
    b"\n": [b""],
    b"a": [b"a"],
    b"a\n": [b"a"],
    b"a\nb": [b"a", b"b"],
    b"one\r\ntwo\r\n": [b"one\r", b"two\r"],
    b"a\n\nb\n": [b"a", b"", b"b"],
    b"\xff\xfe\x00\nlonger than a block\n": [b"\xff\xfe\x00", b"longer than a block"],
}


def flat(shard: Path, offset: int = 0) -> list[bytes]:
    blocks = blocks_of_shard(shard, fingerprint_of(shard), offset=offset)
    return [line for block in blocks for line in block]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, index.BLOCK_BYTES])
@pytest.mark.parametrize("content", list(CONTENTS))
def test_lines_are_split_at_any_block_size(
    shard: Path, content: bytes, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "BLOCK_BYTES", block_bytes)
    shard.write_bytes(content)
    assert flat(shard) == CONTENTS[content]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_endless_line_is_refused_by_number(
    shard: Path, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "LINE_LIMIT_BYTES", 100)
    monkeypatch.setattr(index, "BLOCK_BYTES", 16)
    shard.write_bytes(b"first\n" + b"x" * 101 + end)
    with pytest.raises(InvalidSample, match=r"shard_00000.txt:2: longer than 100 bytes"):
        flat(shard)


def test_offset_inside_a_line_is_refused(shard: Path) -> None:
    shard.write_bytes(b"abc\ndef\n")
    assert flat(shard, offset=4) == [b"def"]
    with pytest.raises(ShardChanged, match="no line that begins at byte 5"):
        flat(shard, offset=5)


@pytest.mark.parametrize("content", [b"0123456789\n" * 100_001, b"0123456789\n"])
def test_shard_that_changes_during_reading_is_refused(shard: Path, content: bytes) -> None:
    shard.write_bytes(b"0123456789\n" * 100_000)
    blocks = blocks_of_shard(shard, fingerprint_of(shard))
    next(blocks)
    shard.write_bytes(content)
    with pytest.raises(ShardChanged, match="changed while it was being read"):
        next(blocks)


def test_unreadable_shard_names_its_path(tmp_path: Path) -> None:
    directory = tmp_path / "shard_00000.txt"
    directory.mkdir()
    with pytest.raises(ShardUnreadable, match=r"shard_00000.txt cannot be read \(Is a directory\)"):
        flat(directory)
