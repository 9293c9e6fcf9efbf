"""Writes a data set so that a reader never sees an incomplete one.

Everything is written into a hidden directory inside the target (so on the same file system),
synced, and moved into place file by file with ``dataset.json`` last. Each shard gets a contiguous
run of lines, so one file is open at a time.
"""

import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from secrets import token_hex

import msgspec
from xxhash import xxh3_64

from muster.contracts.location import S3Location
from muster.contracts.shards import Shard
from muster.datasets.errors import DatasetExists, DatasetNotWritable
from muster.datasets.index import ShardIndex, index_beside
from muster.datasets.schema import Contents
from muster.datasets.source import FACTS_NAME, HELD_OUT_NAME, shard_name, sorted_shard_names
from muster.datasets.sources.s3 import FACTS_LIMIT_BYTES, WRITING
from muster.objects.client import THREADS, S3Client
from muster.objects.errors import ObjectMissing
from muster.objects.probe import check_store


def write_dataset(directory: Path, contents: Contents, *, replace: bool = False) -> None:
    """Write `contents` to `directory`, which is made if necessary and must hold no shards.

    With `replace` it may hold a data set, which is removed once the new one is written; other files
    stay. If anything fails before that, nothing has changed. Raises `DatasetExists` and
    `DatasetNotWritable`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not replace and shards_in(directory):
            raise DatasetExists(directory)
        with tempfile.TemporaryDirectory(
            prefix=".muster-dataset-", dir=directory, ignore_cleanup_errors=True
        ) as staging:
            _write_files(Path(staging), contents)
            if replace:
                _remove_dataset(directory)
            _move_in(Path(staging), directory)
    except OSError as error:
        raise DatasetNotWritable(
            directory, f"{error.strerror or error}; choose another directory"
        ) from error


def upload_dataset(
    location: S3Location, client: S3Client, contents: Contents, *, replace: bool = False
) -> None:
    """Write `contents` below `location`, as `write_dataset` does; raises `ObjectStoreError`, too.

    A store has no rename: ``dataset.json`` says that the data set is incomplete until the rest of
    it is there. Before that, everything is written to the directory for temporary files. What an
    upload that was cut short has left is replaced.
    """
    facts, content, etag = location / FACTS_NAME, bytearray(), None
    with suppress(ObjectMissing):
        content, etag = client.read(facts, FACTS_LIMIT_BYTES)
    old = [item.name for item in client.list(location, "shard_")]
    if (old or etag) and not replace and not content.startswith(WRITING):
        raise DatasetExists(location)
    check_store(client, location)

    def put(path: Path) -> None:
        with (
            path.open("rb") as file,
            mmap(file.fileno(), 0, access=ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            client.put_if_absent(location / path.name, [view])

    try:
        with tempfile.TemporaryDirectory(prefix="muster-dataset-") as staging:
            _write_files(Path(staging), contents)
            etag = client.compare_and_swap(facts, WRITING + b'"%s"}' % token_hex().encode(), etag)
            client.delete(location / name for name in (*old, HELD_OUT_NAME))
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(put, [*shards_in(Path(staging)), *Path(staging).glob(HELD_OUT_NAME)]))
            client.compare_and_swap(facts, (Path(staging) / FACTS_NAME).read_bytes(), etag)
    except OSError as error:
        raise DatasetNotWritable(location, f"{error.strerror or error} in TMPDIR") from error


def _write_files(staging: Path, contents: Contents) -> None:
    facts = contents.facts
    lines = iter(contents.lines)
    files: list[Shard] = []
    base, extra = divmod(facts.samples, facts.shards)
    for number in range(facts.shards):
        shard = staging / shard_name(number)
        xxh3 = _write_lines(shard, islice(lines, base + (number < extra)))
        index = ShardIndex.build(shard, index_beside(shard))
        size_bytes, totals = index.fingerprint.size_bytes, index.totals
        files.append(Shard(shard.name, size_bytes, totals.lines, totals.hash_sum, xxh3))
    if facts.held_out:
        _write_lines(staging / HELD_OUT_NAME, contents.held_out)
    _write_lines(
        staging / FACTS_NAME,
        [msgspec.json.encode(msgspec.structs.replace(facts, files=tuple(files)))],
    )


def _write_lines(path: Path, lines: Iterable[bytes]) -> str:
    """Return the hash of the file."""
    digest = xxh3_64()
    with path.open("wb") as file:
        for line in lines:
            content = line + b"\n"
            digest.update(content)
            file.write(content)
        file.flush()
        # A shard truncated by a power failure would look like a smaller data set.
        os.fsync(file.fileno())
    return digest.hexdigest()


def _move_in(staging: Path, directory: Path) -> None:
    names = sorted(path.name for path in staging.iterdir() if path.name != FACTS_NAME)
    for name in [*names, FACTS_NAME]:
        (staging / name).rename(directory / name)


def _remove_dataset(directory: Path) -> None:
    (directory / FACTS_NAME).unlink(missing_ok=True)
    (directory / HELD_OUT_NAME).unlink(missing_ok=True)
    for shard in shards_in(directory):
        index_beside(shard).unlink(missing_ok=True)
        shard.unlink()


def shards_in(directory: Path) -> list[Path]:
    """Return the shard files in a directory, in order."""
    names = sorted_shard_names(path.name for path in directory.iterdir())
    return [directory / name for name in names]
