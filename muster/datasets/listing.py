"""Which files are the shards of a data set, and in which order.

The position in this listing is what assigns a shard to a rank, so every process and every kind
of storage must come to the same one: by name alone, whatever the file turns out to be.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from muster.datasets.errors import DatasetEmpty, DatasetMissing, ShardUnreadable

_SHARD_NAME: Final = re.compile(r"shard_[^/]+\.txt")


def shard_name(number: int) -> str:
    """Return the file name of the shard with this number, counted from 0."""
    return f"shard_{number:05d}.txt"


def sorted_shard_names(names: Iterable[str]) -> list[str]:
    """Return those of `names` that are shards, sorted by code point."""
    return sorted(name for name in names if _SHARD_NAME.fullmatch(name))


def find_shards(directory: Path) -> list[Path]:
    """Return the shards of a data set in the order that assigns them to ranks.

    Raises `DatasetMissing`, `ShardUnreadable`, or `DatasetEmpty` if there is not a single line.
    A dangling link is listed like any other shard: better an error than a sample left out.
    """
    shards = [directory / name for name in sorted_shard_names(_names_in(directory))]
    if not shards:
        raise DatasetEmpty(directory, "holds no shard file such as shard_00000.txt")
    if not any(_size_bytes(shard) for shard in shards):
        raise DatasetEmpty(directory, f"has {len(shards)} shards and not one line in them")
    return shards


def _names_in(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        raise DatasetMissing(directory, "does not exist") from None
    except NotADirectoryError:
        raise DatasetMissing(directory, "is no directory") from None
    except OSError as error:
        raise ShardUnreadable(directory, error) from error


def _size_bytes(shard: Path) -> int:
    try:
        return shard.stat().st_size
    except OSError as error:
        raise ShardUnreadable(shard, error) from error
