"""Write a data set so that a reader never sees half of one.

Everything is written into a hidden directory inside the target (so on the same file system),
synced, and moved into place file by file with ``dataset.json`` last: who finds that finds all.
Lines are dealt out in contiguous runs, so one file is open at a time, whatever their number.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import msgspec

from muster.datasets.contents import FACTS_NAME, HELD_OUT_NAME, Contents
from muster.datasets.errors import DatasetNotWritable
from muster.datasets.index import ShardIndex, index_beside
from muster.datasets.listing import shard_name, sorted_shard_names


def write_dataset(directory: Path, contents: Contents) -> None:
    """Write `contents` to `directory`, which is made if need be and must hold no shard yet.

    If anything fails, `directory` is left without a file of ours. Raises `DatasetNotWritable`.
    """
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if _shards_in(directory):
            raise DatasetNotWritable(
                directory, "it already holds shards; choose another directory or add --force"
            )
        with _staged(directory, contents) as staging:
            _move_in(staging, directory)


def replace_dataset(directory: Path, contents: Contents) -> None:
    """Write `contents` to `directory` in place of the data set that is there, if any.

    The old one goes only once the new one is written; files that are no part of a data set
    stay. Raises `DatasetNotWritable`.
    """
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with _staged(directory, contents) as staging:
            _remove_dataset(directory)
            _move_in(staging, directory)


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
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
    base, extra = divmod(facts.samples, facts.shards)
    for number in range(facts.shards):
        shard = staging / shard_name(number)
        _write_lines(shard, islice(lines, base + (number < extra)))
        ShardIndex.build(shard, index_beside(shard))
    if facts.held_out:
        _write_lines(staging / HELD_OUT_NAME, contents.held_out)
    _write_lines(staging / FACTS_NAME, [msgspec.json.encode(facts)])


def _write_lines(path: Path, lines: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        # A shard cut short by a power failure would pass for a smaller data set.
        os.fsync(file.fileno())


def _move_in(staging: Path, directory: Path) -> None:
    names = sorted(path.name for path in staging.iterdir() if path.name != FACTS_NAME)
    for name in [*names, FACTS_NAME]:
        (staging / name).rename(directory / name)


def _remove_dataset(directory: Path) -> None:
    (directory / FACTS_NAME).unlink(missing_ok=True)
    (directory / HELD_OUT_NAME).unlink(missing_ok=True)
    for shard in _shards_in(directory):
        index_beside(shard).unlink(missing_ok=True)
        shard.unlink()


def _shards_in(directory: Path) -> list[Path]:
    names = sorted_shard_names(path.name for path in directory.iterdir())
    return [directory / name for name in names]
