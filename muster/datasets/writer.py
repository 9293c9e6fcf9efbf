"""Writes a data set so that a reader never sees an incomplete one.

Everything is written into a hidden directory inside the target (so on the same file system),
synced, and moved into place file by file with ``dataset.json`` last. Each shard gets a contiguous
run of lines, so one file is open at a time.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64

from muster.contracts.shards import Shard
from muster.datasets.errors import DatasetNotWritable
from muster.datasets.index import ShardIndex, index_beside
from muster.datasets.schema import HELD_OUT_NAME, Contents
from muster.datasets.source import FACTS_NAME, shard_name, sorted_shard_names


def write_dataset(directory: Path, contents: Contents, *, replace: bool = False) -> None:
    """Write `contents` to `directory`, which is made if necessary and must hold no shards.

    With `replace` it may hold a data set, which is removed once the new one is written; other files
    stay. If anything fails before that, nothing has changed. Raises `DatasetNotWritable`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not replace and shards_in(directory):
            raise DatasetNotWritable(
                directory, "it already holds shards; choose another directory or add --force"
            )
        with _staged(directory, contents) as staging:
            if replace:
                _remove_dataset(directory)
            _move_in(staging, directory)
    except OSError as error:
        raise DatasetNotWritable(
            directory, f"{error.strerror or error}; choose another directory"
        ) from error


@contextmanager
def _staged(directory: Path, contents: Contents) -> Iterator[Path]:
    staging = Path(tempfile.mkdtemp(prefix=".muster-dataset-", dir=directory))
    try:
        _write_files(staging, contents)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_files(staging: Path, contents: Contents) -> None:
    facts = contents.facts
    lines = iter(contents.lines)
    files: list[Shard] = []
    base, extra = divmod(facts.samples, facts.shards)
    for number in range(facts.shards):
        shard = staging / shard_name(number)
        xxh3 = _write_lines(shard, islice(lines, base + (number < extra)))
        index = ShardIndex.build(shard, index_beside(shard))
        files.append(
            Shard(
                name=shard.name,
                size_bytes=index.fingerprint.size_bytes,
                lines=index.lines,
                hash_sum=index.hash_sum,
                xxh3=xxh3,
            )
        )
    if facts.held_out:
        _write_lines(staging / HELD_OUT_NAME, contents.held_out)
    _write_lines(staging / FACTS_NAME, [msgspec.json.encode(replace(facts, files=tuple(files)))])


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
