from pathlib import Path

import pytest

from muster.datasets import lines
from muster.datasets.errors import InvalidSample, ShardChanged, ShardUnreadable
from muster.datasets.lines import blocks_of_shard, fingerprint_of

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


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return tmp_path / "shard_00000.txt"


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, lines.BLOCK_BYTES])
@pytest.mark.parametrize("content", list(CONTENTS))
def test_lines_are_what_lies_between_newlines_wherever_blocks_end(
    shard: Path, content: bytes, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", block_bytes)
    shard.write_bytes(content)
    assert flat(shard) == CONTENTS[content]


def test_a_line_of_five_megabytes_is_one_line(shard: Path) -> None:
    long = b"x" * 5_000_000
    shard.write_bytes(b"short\n" + long + b"\nshort")
    assert flat(shard) == [b"short", long, b"short"]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_end_is_refused_by_name_and_number(
    shard: Path, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_LIMIT_BYTES", 100)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 16)
    shard.write_bytes(b"first\n" + b"x" * 101 + end)
    with pytest.raises(InvalidSample, match=r"shard_00000.txt:2: longer than 100 bytes"):
        flat(shard)


def test_an_offset_inside_a_line_is_refused(shard: Path) -> None:
    shard.write_bytes(b"abc\ndef\n")
    assert flat(shard, offset=4) == [b"def"]
    with pytest.raises(ShardChanged, match="no line that begins at byte 5"):
        flat(shard, offset=5)


def test_a_shard_that_grows_while_it_is_read_is_noticed(shard: Path) -> None:
    shard.write_bytes(b"0123456789\n" * 100_000)
    blocks = blocks_of_shard(shard, fingerprint_of(shard))
    next(blocks)
    with shard.open("ab") as file:
        file.write(b"one more\n")
    with pytest.raises(ShardChanged, match="changed while it was being read"):
        next(blocks)


def test_a_shard_that_is_cut_while_its_end_is_read_is_noticed(shard: Path) -> None:
    shard.write_bytes(b"abc\ndef\n")
    blocks = blocks_of_shard(shard, fingerprint_of(shard))
    assert next(blocks) == [b"abc", b"def"]
    shard.write_bytes(b"abc\n")
    with pytest.raises(ShardChanged):
        next(blocks)


def test_what_the_system_refuses_is_a_sentence_with_the_path(tmp_path: Path) -> None:
    directory = tmp_path / "shard_00000.txt"
    directory.mkdir()
    with pytest.raises(ShardUnreadable, match=r"shard_00000.txt cannot be read \(Is a directory\)"):
        flat(directory)
