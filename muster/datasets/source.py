"""The interface to the shards of a data set, wherever they lie; and data sets on a disk."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from itertools import filterfalse
from pathlib import Path
from typing import Final, Protocol

import msgspec

from muster.contracts.errors import printable
from muster.contracts.location import Location
from muster.contracts.shards import Reading, Shard
from muster.datasets.errors import DatasetEmpty, DatasetMissing, InvalidSample, ShardUnreadable
from muster.datasets.index import (
    ShardIndex,
    Totals,
    blocks_of_shard,
    fingerprint_of,
    first_blank,
    shard_errors,
)

FACTS_NAME: Final = "dataset.json"
HELD_OUT_NAME: Final = "test.jsonl"

_SHARD_NAME: Final = re.compile(r"shard_[^/]+\.txt")
_NUMBERED: Final = re.compile(r"shard_[0-9]+\.txt")
_DATA_NAME: Final = re.compile(
    r"(?is)shard.*|.*\.(txt|jsonl?|[ct]sv|parquet|npy|[gx]z|zst|zip|tar)"
)
_OWN_NAME: Final = re.compile(rf"(?s)\..*|.*\.idx|{FACTS_NAME}|{HELD_OUT_NAME}")

NAMES_SHOWN: Final = 5


class DatasetFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of ``dataset.json``: how a generated data set was made."""

    kind: str
    samples: int  # samples of all shards
    held_out: int = 0  # samples in ``test.jsonl``, which are in no shard
    shards: int
    features: int
    classes: int
    seed: int
    files: tuple[Shard, ...] = ()  # empty in data sets of earlier versions


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What a `DataSource` knows without reading a shard."""

    shards: Sequence[Shard]
    facts: DatasetFacts | None
    digest: str  # of the names and versions of all shards, in order


class DataSource(Protocol):
    """A data set to read. Thread-safe. Raises a `DatasetError` where a method cannot answer.

    A source never changes: its shards, in the order that assigns them to ranks, were listed when it
    was opened. The order depends on names alone, so every process and every kind of storage agree.
    At least one shard is not empty.
    """

    @property
    def location(self) -> Location: ...

    @property
    def shards(self) -> Sequence[Shard]: ...

    @property
    def facts(self) -> DatasetFacts | None:
        """How the data set was made; None for one that was not generated."""

    def path(self, shard_idx: int, reading: Reading | None = None) -> Path:
        """Return a complete, verified local file with the content of a shard; waits for it.

        The file stays until the same rank asks for its next shard. The shard is one of
        ``reading.shard_idxs``; a source that fetches uses their order to fetch early and to keep
        what is needed soonest. None means no known order: every shard stays. Ask again if the file
        is gone: what fetches it may have died. Raises `ShardUnreadable`, and `ShardChanged` for a
        shard that is not the listed one.
        """

    def totals(self, shard_idxs: range) -> list[Totals]:
        """Return the totals of each of these shards, which are read if that is necessary."""


class LocalSource:
    """The shards in a directory. An index on disk knows their totals."""

    def __init__(self, directory: Path) -> None:
        """Raise `DatasetMissing`, `DatasetEmpty`, and `ShardUnreadable`, also for a broken link."""
        self.location: Final = directory
        self._foreign: Final = [*filterfalse(_OWN_NAME.fullmatch, _names_in(directory))]
        self._paths = [directory / name for name in sorted_shard_names(self._foreign)]
        self.shards: Final = [
            Shard(path.name, fingerprint_of(path).size_bytes) for path in self._paths
        ]
        refuse_empty(directory, self.shards, self._foreign)

    def remarks(self) -> Iterator[str]:
        """Yield what the user should know of names. Raises `InvalidSample` for a blank last line.

        Blank lines elsewhere are found when a shard is indexed or read.
        """
        for path, shard in zip(self._paths, self.shards, strict=True):
            if shard.size_bytes:  # a named pipe has none, and would not be opened
                _refuse_blank_end(path, shard.size_bytes)
        shards = [shard.name for shard in self.shards]
        odd = [name for name in shards if not _NUMBERED.fullmatch(name)]
        if len(odd) < len(shards) and odd:
            yield f"{self.location}: {_shown(odd)} will be read, too"
        if others := [name for name in {*self._foreign} - {*shards} if _DATA_NAME.fullmatch(name)]:
            yield f"{self.location}: {_shown(others)} will not be read: data are in shard_*.txt"

    @property
    def facts(self) -> DatasetFacts | None:
        return read_facts(self.location)

    def path(self, shard_idx: int, _reading: Reading | None = None) -> Path:
        return self._paths[shard_idx]

    def totals(self, shard_idxs: range) -> list[Totals]:
        # Not those in the facts: a shard may have been edited since.
        return [ShardIndex.open(self._paths[idx]).totals for idx in shard_idxs]


def shard_name(number: int) -> str:
    """Return the file name of the shard with this number, counted from 0."""
    return f"shard_{number:05d}.txt"


def sorted_shard_names(names: Iterable[str]) -> list[str]:
    """Return those of `names` that are shards, sorted by code point."""
    return sorted(name for name in names if _SHARD_NAME.fullmatch(name))


def refuse_empty(location: Location, shards: Sequence[Shard], found: Sequence[str] = ()) -> None:
    """Raise `DatasetEmpty` if there is not a single line; `found` names the files there."""
    problem, cure = "holds no shard file such as shard_00000.txt", ""
    if shards:
        problem, cure = f"has {len(shards)} shards without a single line", "write samples into them"
    elif found:
        problem += f", but {_shown(found)}"
        cure = "rename files that hold one sample a line, and unpack or convert others"
    if not any(shard.size_bytes for shard in shards):
        raise DatasetEmpty(location, problem, cure)


def read_facts(directory: Path) -> DatasetFacts | None:
    """Return the facts of a complete generated data set; None for any other directory."""
    try:
        return decode_facts((directory / FACTS_NAME).read_bytes())
    except OSError:
        return None


def decode_facts(content: bytes | bytearray) -> DatasetFacts | None:
    """Return the facts of a generated data set; None if these are not such facts."""
    try:
        return msgspec.json.decode(content, type=DatasetFacts)
    except msgspec.MsgspecError:
        return None


def _names_in(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        raise DatasetMissing(directory, "does not exist") from None
    except NotADirectoryError:
        cure = "name the directory that holds shard_00000.txt, shard_00001.txt, …"
        raise DatasetMissing(directory, "is not a directory", cure) from None
    except OSError as error:
        raise ShardUnreadable(directory, error) from error


def _shown(names: Iterable[str]) -> str:
    first, rest = sorted(names)[:NAMES_SHOWN], len([*names]) - NAMES_SHOWN
    return printable(", ".join(first)) + (f" and {rest} more" if rest > 0 else "")


def _refuse_blank_end(shard: Path, size_bytes: int) -> None:
    with shard_errors(shard), FileIO(shard) as file:
        end = os.pread(file.fileno(), 3, max(0, size_bytes - 3))
    if end and first_blank(end.removesuffix(b"\n").split(b"\n")[-1:]) is not None:
        number = sum(map(len, blocks_of_shard(shard, fingerprint_of(shard))))
        raise InvalidSample(shard, number, "the last line is blank")
