"""A data set in a directory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from muster.contracts.shards import Reading, Shard
from muster.datasets.errors import DatasetMissing, ShardUnreadable
from muster.datasets.index import ShardIndex, Totals, fingerprint_of
from muster.datasets.source import (
    FACTS_NAME,
    DatasetFacts,
    decode_facts,
    refuse_empty,
    sorted_shard_names,
)


class LocalSource:
    """The shards in a directory. An index on disk knows their totals."""

    def __init__(self, directory: Path) -> None:
        """Even a dangling link is listed, and refused."""
        self.location: Final = directory
        self._paths = [directory / name for name in sorted_shard_names(_names_in(directory))]
        self.shards: Final = [
            Shard(name=path.name, size_bytes=fingerprint_of(path).size_bytes)
            for path in self._paths
        ]
        refuse_empty(directory, self.shards)

    @property
    def facts(self) -> DatasetFacts | None:
        return read_facts(self.location)

    def path(self, shard_idx: int, _reading: Reading | None = None) -> Path:
        return self._paths[shard_idx]

    def totals(self, shard_idxs: Iterable[int]) -> list[Totals]:
        # Not those in the facts: somebody may have edited a shard since.
        return [ShardIndex.open(self._paths[idx]).totals for idx in shard_idxs]

    known_totals = totals


def read_facts(directory: Path) -> DatasetFacts | None:
    """Return the facts of a complete generated data set; None for any other directory."""
    try:
        return decode_facts((directory / FACTS_NAME).read_bytes())
    except OSError:
        return None


def _names_in(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        raise DatasetMissing(directory, "does not exist") from None
    except NotADirectoryError:
        raise DatasetMissing(directory, "is not a directory") from None
    except OSError as error:
        raise ShardUnreadable(directory, error) from error
