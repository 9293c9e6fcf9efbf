"""The promises of data sources, kept by a directory, memory and a store."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from muster.contracts.shards import Reading
from muster.datasets.cache import ShardCache
from muster.datasets.errors import DatasetEmpty
from muster.datasets.index import Totals, line_hash
from muster.datasets.reader import SampleReader
from muster.datasets.source import FACTS_NAME, DatasetFacts, DataSource, LocalSource
from muster.datasets.sources.s3 import S3Source
from tests.support.s3_server import put_files
from tests.support.sources import MemorySource

CONTENTS = {
    "shard_00010.txt": b"4\n5",  # comes last; no newline at the end
    "shard_00000.txt": b"0\n1\n",
    "shard_00002.txt": b"2\n3\n",
    "shard_00001.txt": b"",
}
FACTS = DatasetFacts(kind="test", samples=6, shards=4, features=1, classes=2, seed=0)

Opener = Callable[[Mapping[str, bytes], DatasetFacts | None], DataSource]


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def open_(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    def open_s3(contents: Mapping[str, bytes], facts: DatasetFacts | None) -> DataSource:
        client, place = request.getfixturevalue("s3"), request.getfixturevalue("place")
        put_files(client, place, contents)
        if facts is not None:
            put_files(client, place, {FACTS_NAME: msgspec.json.encode(facts)})
        return S3Source(place, client, ShardCache(tmp_path, 1 << 30))

    def open_local(contents: Mapping[str, bytes], facts: DatasetFacts | None) -> DataSource:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        if facts is not None:
            (tmp_path / FACTS_NAME).write_bytes(msgspec.json.encode(facts))
        return LocalSource(tmp_path)

    def open_memory(contents: Mapping[str, bytes], facts: DatasetFacts | None) -> DataSource:
        encoded = {} if facts is None else {FACTS_NAME: msgspec.json.encode(facts)}
        return MemorySource({**contents, **encoded})

    return {"local": open_local, "memory": open_memory, "s3": open_s3}[request.param]


def test_shards_are_listed_by_name_with_their_sizes(open_: Opener) -> None:
    source = open_({**CONTENTS, "test.jsonl": b"{}\n", ".shard_1.txt": b""}, None)
    listed = [(shard.name, shard.size_bytes) for shard in source.shards]
    assert listed == sorted((name, len(content)) for name, content in CONTENTS.items())
    assert source.location / source.shards[0].name


@pytest.mark.parametrize("reading", [None, Reading(epochs_left=1)])
def test_path_holds_the_whole_shard(open_: Opener, reading: Reading | None) -> None:
    source = open_(CONTENTS, None)
    for _ in range(2):
        for idx, shard in enumerate(source.shards):
            assert source.path(idx, reading).read_bytes() == CONTENTS[shard.name]


def test_totals_count_lines_and_add_their_hashes(open_: Opener) -> None:
    source = open_(CONTENTS, None)
    expected = [
        Totals(lines=len(lines), hash_sum=sum(map(line_hash, lines)) % 2**64)
        for lines in ([b"0", b"1"], [], [b"2", b"3"], [b"4", b"5"])
    ]
    assert source.totals(range(4)) == expected
    assert source.totals([3, 1]) == [expected[3], expected[1]]


def test_facts_are_those_written(open_: Opener) -> None:
    assert open_(CONTENTS, FACTS).facts == FACTS


def test_data_set_without_facts_has_none(open_: Opener) -> None:
    assert open_(CONTENTS, None).facts is None


@pytest.mark.parametrize("contents", [{}, {"test.jsonl": b"{}\n"}, {"shard_00000.txt": b""}])
def test_data_set_without_a_line_is_refused(open_: Opener, contents: dict[str, bytes]) -> None:
    with pytest.raises(DatasetEmpty):
        open_(contents, None)


def test_ranks_together_read_every_sample_once_an_epoch(open_: Opener) -> None:
    source = open_(CONTENTS, None)
    read = []
    for rank in range(3):
        reader = SampleReader(lambda: source, 2, Reading(rank=rank, world_size=3))
        read += [one for batch in reader.batches(2, msgspec.json.Decoder()) for one in batch]
    assert sorted(read) == sorted([*range(6)] * 2)
