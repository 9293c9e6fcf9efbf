"""A data set in memory, for tests and for trying."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Final
from weakref import finalize

from muster.contracts.shards import Reading, Shard
from muster.datasets.index import ShardIndex, Totals
from muster.datasets.source import DatasetFacts, refuse_empty, sorted_shard_names


class MemorySource:
    """The shards in a mapping of names to content; a shard that is read becomes a private file."""

    def __init__(self, contents: Mapping[str, bytes], facts: DatasetFacts | None = None) -> None:
        self.facts: Final = facts
        self._contents: Final = dict(contents)
        self.location: Final = Path(mkdtemp(prefix="muster-memory-"))
        finalize(self, shutil.rmtree, self.location)
        self.shards: Final = [
            Shard(name=name, size_bytes=len(contents[name]))
            for name in sorted_shard_names(contents)
        ]
        refuse_empty(self.location, self.shards)

    def path(self, shard_idx: int, _reading: Reading | None = None) -> Path:
        path = self.location / self.shards[shard_idx].name
        if not path.exists():
            path.write_bytes(self._contents[path.name])
        return path

    def totals(self, shard_idxs: Iterable[int]) -> list[Totals]:
        return [ShardIndex.open(self.path(idx)).totals for idx in shard_idxs]

    known_totals = totals
