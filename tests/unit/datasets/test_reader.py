from itertools import islice
from pathlib import Path

import msgspec
import pytest

from muster.contracts.shards import Position, Reading
from muster.datasets.errors import (
    DatasetEmpty,
    DatasetMissing,
    InvalidSample,
    ShardChanged,
    ShardUnreadable,
)
from muster.datasets.index import ShardIndex, index_beside
from muster.datasets.reader import (
    parse_sample,
    read_lines,
)
from muster.datasets.schema import LabelledSample
from muster.datasets.source import LocalSource, shard_name
from muster.datasets.sources import open_source
from tests.support.ranks import write_contents

START = Position()


def at(shard_idx: int, line_idx: int) -> Position:
    return Position(shard_idx=shard_idx, line_idx=line_idx)


def test_lines_come_once_with_the_position_after(shards: list[Path]) -> None:
    assert list(read_lines(open_source(shards[0].parent), START)) == [
        (b"a", 1, 1),
        (b"b", 1, 2),
        (b"c", 1, 3),
        (b"d\r", 4, 1),
        (b"e\r", 4, 2),
        (b"f", 4, 3),
        (b"\xff\xfe", 5, 1),
        (b"g" * 1000, 5, 2),
    ]


def test_reading_resumes_at_every_position(shards: list[Path]) -> None:
    everything = list(read_lines(open_source(shards[0].parent), START))
    for number, (_, shard_idx, line_idx) in enumerate(everything, start=1):
        assert (
            list(read_lines(open_source(shards[0].parent), at(shard_idx, line_idx)))
            == everything[number:]
        )
    for shard_idx in range(len(shards) + 1):
        rest = [entry for entry in everything if entry[1] >= shard_idx]
        assert list(read_lines(open_source(shards[0].parent), at(shard_idx, 0))) == rest


def test_rank_without_shards_reads_nothing(shards: list[Path]) -> None:
    assert (
        list(read_lines(open_source(shards[0].parent), START, Reading(rank=7, world_size=8))) == []
    )


def test_start_of_a_shard_needs_no_index(shards: list[Path]) -> None:
    list(read_lines(open_source(shards[0].parent), at(1, 0)))
    assert not any(index_beside(shard).exists() for shard in shards)


@pytest.mark.parametrize("blank", [b"", b"\r"])
def test_blank_line_is_refused_after_earlier_lines(tmp_path: Path, blank: bytes) -> None:
    shards = write_contents(tmp_path, b"a\nb\n" + blank + b"\nc\n")
    reading = read_lines(open_source(shards[0].parent), START)
    assert list(islice(reading, 2)) == [(b"a", 0, 1), (b"b", 0, 2)]
    with pytest.raises(InvalidSample, match=r"shard_00000.txt:3: the line is blank"):
        next(reading)
    with pytest.raises(InvalidSample, match=r"shard_00000.txt:3:"):
        list(read_lines(open_source(shards[0].parent), at(0, 2)))


def test_shard_shorter_than_position_has_changed(shards: list[Path]) -> None:
    ShardIndex.open(shards[1])
    shards[1].write_bytes(b"a\n")
    with pytest.raises(ShardChanged, match="has 1 lines, but 3 were already consumed"):
        list(read_lines(open_source(shards[0].parent), at(1, 3)))


def test_missing_shard_raises_when_reached(shards: list[Path]) -> None:
    reading = read_lines(open_source(shards[0].parent), START)
    shards[2].unlink()
    assert len(list(islice(reading, 3))) == 3
    with pytest.raises(ShardUnreadable, match=r"shard_00002.txt cannot be read"):
        next(reading)


@pytest.mark.parametrize("position", [at(8, 0), at(7, 1)])
def test_position_behind_the_last_shard_is_refused(shards: list[Path], position: Position) -> None:
    with pytest.raises(ShardChanged, match="lost shards"):
        list(read_lines(open_source(shards[0].parent), position))


def test_only_shards_are_listed_in_order(tmp_path: Path) -> None:
    names = [shard_name(number) for number in (0, 9, 10, 99_999)]
    others = ["shard_00001.idx", "test.jsonl", "x.txt", ".shard_00000.txt.ab12.tmp", "shard_.txt"]
    for name in [*reversed(names), *others]:
        (tmp_path / name).write_text("{}\n")
    assert [shard.name for shard in open_source(tmp_path).shards] == names


def test_missing_or_empty_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing, match=r"does not exist: .*muster dataset digits --out .*no"):
        open_source(tmp_path / "no")
    with pytest.raises(DatasetEmpty, match=r"holds no shard file.*muster dataset digits"):
        open_source(tmp_path)
    (tmp_path / "shard_00000.txt").touch()
    with pytest.raises(DatasetEmpty, match="1 shards without a single line"):
        open_source(tmp_path)
    with pytest.raises(DatasetMissing, match="is not a directory"):
        open_source(tmp_path / "shard_00000.txt")


def test_files_that_are_no_shards_are_named_instead_of_an_advice(tmp_path: Path) -> None:
    for name in ("train.jsonl", "part.1.gz", ".hidden", "test.jsonl", *map(str, range(5))):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(DatasetEmpty) as refused:
        open_source(tmp_path)
    assert str(refused.value) == (
        f"the data set {tmp_path} holds no shard file such as shard_00000.txt, but 0, 1, 2, 3, 4 "
        "and 2 more: rename files that hold one sample a line, and unpack or convert others"
    )
    with pytest.raises(DatasetMissing, match="is not a directory: name the directory that holds"):
        open_source(tmp_path / "train.jsonl")


def test_files_read_or_left_out_by_accident_are_named(tmp_path: Path) -> None:
    usual = ["shard_00000.txt", "shard_00000.idx", "dataset.json", "test.jsonl", "README.md"]
    for name in usual:
        (tmp_path / name).write_text("{}\n")
    assert [*LocalSource(tmp_path).remarks()] == []
    for name in ("shard_0 (copy).txt", "c.txt.gz", "b.JSONL", "Shard_2"):
        (tmp_path / name).write_text("{}\n")
    assert [*LocalSource(tmp_path).remarks()] == [
        f"{tmp_path}: shard_0 (copy).txt will be read, too",
        f"{tmp_path}: Shard_2, b.JSONL, c.txt.gz will not be read: data are in shard_*.txt",
    ]


@pytest.mark.parametrize(
    ("content", "blank_line"),
    [
        (b"a\nb", None),
        (b"a\nb\n", None),
        (b"a\nb\r\n", None),
        (b"a\n\n", 2),
        (b"a\nb\n\r\n", 3),
        (b"a\nb\n\r", 3),
        (b"\n", 1),
        (b"", None),
    ],
)
def test_a_blank_last_line_is_refused_at_submission(
    tmp_path: Path, content: bytes, blank_line: int | None
) -> None:
    source = LocalSource(write_contents(tmp_path, b"a\n", content)[0].parent)
    if blank_line is None:
        assert [*source.remarks()] == []
        return
    with pytest.raises(InvalidSample, match=rf"shard_00001.txt:{blank_line}: the last line is b"):
        [*source.remarks()]


def test_dangling_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "shard_00000.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ShardUnreadable, match="shard_00000"):
        open_source(tmp_path)


SHARD = Path("data/shard_00003.txt")
LABELLED = msgspec.json.Decoder(LabelledSample)


def test_sample_is_decoded() -> None:
    line = b'{"x":[0,0.5],"y":3}\r'
    expected = LabelledSample(x=[0.0, 0.5], y=3)
    assert parse_sample(line, LABELLED, shard=SHARD, line_number=1) == expected
    assert parse_sample(b"[1]", msgspec.json.Decoder(), shard=SHARD, line_number=1) == [1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"x":[1],"y":', "truncated"),
        (b'{"x":[1]}', "`y`"),
        (b'{"x":["a"],"y":1}', "Expected `float`, got `str`"),
        (b'{"x":[NaN],"y":1}', "malformed"),
        (b"[" * 100_000, "Expected `object`"),
        (b"no json", "malformed"),
        (b'{"x":[1],"\xff\xfe":1}', "invalid sample"),
    ],
)
def test_invalid_sample_names_its_line(line: bytes, problem: str) -> None:
    with pytest.raises(InvalidSample, match=problem) as caught:
        parse_sample(line, LABELLED, shard=SHARD, line_number=17)
    assert str(caught.value).startswith("data/shard_00003.txt:17: invalid sample")


def test_excerpt_is_short_and_escaped() -> None:
    with pytest.raises(InvalidSample) as caught:
        parse_sample(b"\x1b[31m" + b"z" * 500, LABELLED, shard=SHARD, line_number=1)
    message = str(caught.value)
    assert "\x1b" not in message
    assert "z" * 70 in message
    assert "z" * 80 not in message
