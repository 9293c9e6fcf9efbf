"""The interface to the shards of a data set, wherever they lie, and what they consist of."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from muster.contracts.location import Location
from muster.contracts.shards import Reading, Shard
from muster.datasets.errors import DatasetEmpty
from muster.datasets.index import Totals

FACTS_NAME: Final = "dataset.json"

WRITING: Final = b'{"writing":'
"""How ``dataset.json`` begins in a store until all shards are there."""

SHARD_PREFIX: Final = "shard_"

_SHARD_NAME: Final = re.compile(rf"{SHARD_PREFIX}[^/]+\.txt")


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
        ``reading.own``; a source that fetches uses their order to fetch early and to keep what is
        needed soonest. None means no known order: every shard stays. Raises `ShardUnreadable`, and
        `ShardChanged` for a shard that is not the listed one.
        """

    def totals(self, shard_idxs: Iterable[int]) -> list[Totals]:
        """Return the totals of each of these shards, which are read if that is necessary."""

    def known_totals(self, shard_idxs: Iterable[int]) -> list[Totals] | None:
        """Return the same, or None if a shard would have to be fetched first."""


def shard_name(number: int) -> str:
    """Return the file name of the shard with this number, counted from 0."""
    return f"shard_{number:05d}.txt"


def sorted_shard_names(names: Iterable[str]) -> list[str]:
    """Return those of `names` that are shards, sorted by code point."""
    return sorted(name for name in names if _SHARD_NAME.fullmatch(name))


def refuse_empty(location: Location, shards: Sequence[Shard]) -> None:
    """Raise `DatasetEmpty` if there is not a single line."""
    if not shards:
        raise DatasetEmpty(location, "holds no shard file such as shard_00000.txt")
    if not any(shard.size_bytes for shard in shards):
        raise DatasetEmpty(location, f"has {len(shards)} shards without a single line")


def decode_facts(content: bytes | bytearray) -> DatasetFacts | None:
    """Return the facts of a generated data set; None if these are not such facts."""
    try:
        return msgspec.json.decode(content, type=DatasetFacts)
    except msgspec.MsgspecError:
        return None
