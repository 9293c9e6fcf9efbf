"""Data sets in a store: what is requested, what is kept, and what is refused."""

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

from muster.contracts.location import S3Location
from muster.contracts.shards import Reading, Shard
from muster.datasets.cache import ShardCache
from muster.datasets.errors import (
    CacheFull,
    DatasetEmpty,
    DatasetMissing,
    DatasetNotWritable,
    InvalidSample,
    ShardChanged,
)
from muster.datasets.index import line_hash
from muster.datasets.random_access import RandomAccess
from muster.datasets.reader import SampleReader
from muster.datasets.schema import Contents
from muster.datasets.source import FACTS_NAME, DatasetFacts, LocalSource
from muster.datasets.sources.s3 import S3Source
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import upload_dataset, write_dataset
from muster.objects.client import S3Client
from muster.objects.errors import StoreRefused
from tests.support.faulty_store import FaultyStore
from tests.support.s3_server import put_files

SHARDS = {f"shard_{number:05d}.txt": b"%d\n" % number * 500 for number in range(4)}
FACTS = DatasetFacts(
    kind="test",
    samples=2000,
    shards=4,
    features=1,
    classes=2,
    seed=0,
    files=tuple(
        Shard(name, 1000, 500, 500 * line_hash(content[:1]) % 2**64, xxh3_64_hexdigest(content))
        for name, content in SHARDS.items()
    ),
)
WITH_FACTS = {**SHARDS, FACTS_NAME: msgspec.json.encode(FACTS)}
SHARD_NAMES = list(SHARDS)
GETS = [f"GET {name}" for name in SHARDS]
IN_ORDER = Reading(epochs_left=1)


def opened(s3: S3Client, place: S3Location, cache: Path, limit_bytes: int = 1 << 20) -> S3Source:
    return S3Source(place, s3, ShardCache(cache, limit_bytes))


@pytest.fixture(params=[SHARDS, WITH_FACTS], ids=["listed", "with facts"])
def filled(
    request: pytest.FixtureRequest, s3: S3Client, place: S3Location, faulty_store: FaultyStore
) -> S3Location:
    put_files(s3, place, request.param)
    faulty_store.operations.clear()
    return place


def test_a_source_is_opened_with_few_requests(
    s3: S3Client,
    filled: S3Location,
    faulty_store: FaultyStore,
    tmp_path: Path,
) -> None:
    source = opened(s3, filled, tmp_path)
    listing = [] if source.facts else ["LIST"]
    assert faulty_store.operations == [f"GET {FACTS_NAME}", *listing]


def test_epochs_and_restarts_request_a_shard_once(
    s3: S3Client,
    filled: S3Location,
    faulty_store: FaultyStore,
    tmp_path: Path,
) -> None:
    for _ in range(2):
        source = opened(s3, filled, tmp_path)
        batches = SampleReader(lambda source=source: source, 2).batches(100, msgspec.json.Decoder())
        assert sum(map(len, batches)) == 4000
    assert sorted(done for done in faulty_store.operations if "shard" in done) == GETS


def test_lines_of_a_listed_prefix_are_counted_once(
    s3: S3Client, place: S3Location, faulty_store: FaultyStore, tmp_path: Path
) -> None:
    put_files(s3, place, SHARDS)
    seen: list[tuple[int, int]] = []
    cache = ShardCache(tmp_path, 1 << 20)
    source = S3Source(place, s3, cache)
    counted = source.totals(range(4), lambda done, total: seen.append((done, total)))
    assert [totals.lines for totals in counted] == [500] * 4
    assert source.totals(range(4)) == counted
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    faulty_store.operations.clear()
    assert opened(s3, place, tmp_path).totals(range(4)) == counted
    assert faulty_store.operations == [f"GET {FACTS_NAME}", "LIST"]


def test_a_blank_line_in_the_store_is_named_there(
    s3: S3Client, place: S3Location, tmp_path: Path
) -> None:
    put_files(s3, place, {"shard_00000.txt": b"1\n\n2\n"})
    with pytest.raises(InvalidSample, match=rf"^{place}/shard_00000.txt:2: the line is blank"):
        opened(s3, place, tmp_path).totals(range(1))


def test_a_prefix_without_shards_says_what_it_holds(
    s3: S3Client, place: S3Location, tmp_path: Path
) -> None:
    put_files(s3, place, {"train.jsonl": b"1\n"})
    with pytest.raises(
        DatasetEmpty, match=r"holds no shard file .*, but train.jsonl: rename files"
    ):
        opened(s3, place, tmp_path)


def test_next_shard_is_fetched_early(
    s3: S3Client,
    filled: S3Location,
    faulty_store: FaultyStore,
    tmp_path: Path,
) -> None:
    requested = threading.Event()
    faulty_store.fault = lambda done: requested.set() if done == GETS[1] else None
    opened(s3, filled, tmp_path).path(0, IN_ORDER)
    assert requested.wait(60)


@pytest.mark.parametrize(
    "content",
    [b"9\n" * 500, b"9\n" * 499, b"9\n" * 501, None],
    ids=["other", "short", "long", "no"],
)
def test_shard_replaced_in_the_store_is_refused(
    s3: S3Client,
    filled: S3Location,
    tmp_path: Path,
    content: bytes | None,
) -> None:
    source = opened(s3, filled, tmp_path)
    (name, *_) = SHARDS
    s3.delete([filled / name])
    if content is not None:
        put_files(s3, filled, {name: content})
    with pytest.raises(ShardChanged, match=rf"^s3://.*/{name} .*start a new job"):
        source.path(0)
    assert not list(tmp_path.glob("*.txt"))
    assert not list(tmp_path.glob("*.part"))


def test_answer_that_was_cut_is_asked_for_again(
    s3: S3Client, place: S3Location, faulty_store: FaultyStore, tmp_path: Path
) -> None:
    put_files(s3, place, SHARDS)
    source = opened(s3, place, tmp_path)
    faults = iter(["cut", "503"])
    faulty_store.fault = lambda _: next(faults, None)
    assert source.path(0).read_bytes() == SHARDS["shard_00000.txt"]


def test_random_order_keeps_all_shards(s3: S3Client, filled: S3Location, tmp_path: Path) -> None:
    source = opened(s3, filled, tmp_path, 3999)
    with pytest.raises(CacheFull, match=r"of 3999 bytes.*MUSTER_CACHE_BYTES"):
        [source.path(idx) for idx in range(4)]


def test_shard_removed_from_the_cache_is_fetched_again(
    s3: S3Client, filled: S3Location, tmp_path: Path
) -> None:
    source = opened(s3, filled, tmp_path)
    with RandomAccess(source) as access:
        first = access.draw(np.array([0, 499, 500, 1999]))
        access.close()
        for path in tmp_path.glob("*.*"):
            path.unlink()
        assert access.draw(np.array([0, 499, 500, 1999])) == first


def test_files_of_readers_stay_or_come_without_a_read(
    s3: S3Client, filled: S3Location, tmp_path: Path
) -> None:
    source = opened(s3, filled, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    source.path(0)
    assert len(list(tmp_path.glob("cache/*.readers"))) == 1
    source.close()
    assert not list(tmp_path.glob("cache/*.readers"))


def test_unfinished_data_set_is_refused(s3: S3Client, place: S3Location, tmp_path: Path) -> None:
    put_files(s3, place, {**SHARDS, FACTS_NAME: b'{"writing":"0"}'})
    with pytest.raises(DatasetMissing, match="is being written"):
        opened(s3, place, tmp_path)


def written(samples: int, shards: int) -> Contents:
    return synthetic(samples=samples, shards=shards, features=1, classes=2)


def test_written_data_set_is_that_of_a_directory(
    s3: S3Client, place: S3Location, faulty_store: FaultyStore, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "disk", written(20, 4))
    upload_dataset(place, s3, written(20, 4))
    assert faulty_store.operations[-1] == f"PUT {FACTS_NAME}"
    source, disk = opened(s3, place, tmp_path / "cache"), LocalSource(tmp_path / "disk")
    assert source.facts == disk.facts
    assert source.totals(range(4)) == disk.totals(range(4))
    for idx in range(4):
        assert source.path(idx).read_bytes() == disk.path(idx).read_bytes()


def test_data_set_in_a_store_is_replaced_only_by_force(
    s3: S3Client, place: S3Location, tmp_path: Path
) -> None:
    upload_dataset(place, s3, written(20, 4))
    with pytest.raises(DatasetNotWritable, match=r"already holds shards.*--force"):
        upload_dataset(place, s3, written(9, 3))
    upload_dataset(place, s3, written(9, 3), replace=True)
    assert [totals.lines for totals in opened(s3, place, tmp_path).totals(range(3))] == [3, 3, 3]
    assert len(list(s3.list(place))) == 4


def test_a_store_without_conditions_gets_no_data_set(
    s3: S3Client, place: S3Location, faulty_store: FaultyStore
) -> None:
    faulty_store.rewrite = lambda _operation, headers: headers.pop("If-None-Match", None)
    with pytest.raises(StoreRefused, match="overwrites an object"):
        upload_dataset(place, s3, written(20, 4))
    assert [*s3.list(place)] == []


def test_interrupted_upload_is_no_data_set(
    s3: S3Client, place: S3Location, faulty_store: FaultyStore, tmp_path: Path
) -> None:
    faulty_store.fault = lambda done: "403" if done == f"PUT {SHARD_NAMES[2]}" else None
    with pytest.raises(StoreRefused):
        upload_dataset(place, s3, written(20, 4))
    with pytest.raises(DatasetMissing, match="is being written"):
        opened(s3, place, tmp_path)
    faulty_store.fault = lambda _operation: None
    upload_dataset(place, s3, written(9, 3))
    assert len(opened(s3, place, tmp_path).shards) == 3
