import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from msgspec.structs import replace

from muster.contracts.shards import Position, Shard
from muster.datasets.errors import DatasetNotWritable
from muster.datasets.index import ShardIndex, index_beside
from muster.datasets.reader import read_lines
from muster.datasets.schema import Contents
from muster.datasets.source import DatasetFacts, read_facts
from muster.datasets.sources import open_source
from muster.datasets.writer import write_dataset
from tests.support.ranks import shard_paths


def contents(samples: int, shards: int, held_out: int = 0, word: str = "line") -> Contents:
    facts = DatasetFacts(
        kind="test",
        samples=samples,
        held_out=held_out,
        shards=shards,
        features=1,
        classes=2,
        seed=0,
    )
    lines = (f"{word} {number}".encode() for number in range(samples))
    return Contents(facts, lines, [b"kept back"] * held_out)


def lines_in(directory: Path) -> list[bytes]:
    return [line for line, _, _ in read_lines(open_source(directory), Position())]


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_shards_get_even_contiguous_runs(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "data"
    write_dataset(directory, contents(10, shards=3, held_out=2))
    assert lines_in(directory) == [f"line {number}".encode() for number in range(10)]
    shards = shard_paths(directory)
    assert all(index_beside(shard).exists() for shard in shards)
    assert [ShardIndex.open(shard).totals.lines for shard in shards] == [4, 3, 3]
    assert (directory / "test.jsonl").read_bytes() == b"kept back\nkept back\n"
    facts = read_facts(directory)
    assert facts == replace(contents(10, shards=3, held_out=2).facts, files=facts.files)


def test_facts_list_every_shard(tmp_path: Path) -> None:
    write_dataset(tmp_path, contents(5, shards=2))
    for shard, entry in zip(shard_paths(tmp_path), read_facts(tmp_path).files, strict=True):
        index = ShardIndex.open(shard)
        assert entry == Shard(
            name=shard.name,
            size_bytes=shard.stat().st_size,
            lines=index.totals.lines,
            hash_sum=index.totals.hash_sum,
            xxh3=xxhash.xxh3_64_hexdigest(shard.read_bytes()),
        )


def test_existing_shards_are_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "shard_00007.txt").write_bytes(b"mine\n")
    before = files_in(tmp_path)
    with pytest.raises(DatasetNotWritable, match=r"already holds shards.*--force"):
        write_dataset(tmp_path, contents(4, shards=2))
    assert files_in(tmp_path) == before


def test_replacing_removes_only_the_old_data_set(tmp_path: Path) -> None:
    write_dataset(tmp_path, contents(9, shards=3, held_out=1, word="old"))
    (tmp_path / "notes.md").write_bytes(b"mine")
    write_dataset(tmp_path, contents(4, shards=2, word="new"), replace=True)
    assert sorted(files_in(tmp_path)) == [
        "dataset.json",
        "notes.md",
        "shard_00000.idx",
        "shard_00000.txt",
        "shard_00001.idx",
        "shard_00001.txt",
    ]
    assert lines_in(tmp_path) == [b"new 0", b"new 1", b"new 2", b"new 3"]


def failing() -> Iterator[bytes]:
    yield b"one"
    raise KeyError


def test_failed_write_leaves_the_old_data_set(tmp_path: Path) -> None:
    write_dataset(tmp_path, contents(4, shards=2, word="old"))
    before = files_in(tmp_path)
    broken = contents(4, shards=2)._replace(lines=failing())
    with pytest.raises(KeyError):
        write_dataset(tmp_path, broken, replace=True)
    assert files_in(tmp_path) == before


def test_file_instead_of_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DatasetNotWritable, match=r"cannot write to .*file: .*another directory"):
        write_dataset(file, contents(1, shards=1))


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not stop root")
def test_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DatasetNotWritable, match="Permission denied"):
        write_dataset(tmp_path, contents(1, shards=1))


def test_directory_without_facts_is_incomplete(tmp_path: Path) -> None:
    assert read_facts(tmp_path) is None
    (tmp_path / "dataset.json").write_text('{"kind":')
    assert read_facts(tmp_path) is None
