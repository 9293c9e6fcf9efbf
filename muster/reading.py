"""What a rank reads, and what of it counts.

A sample counts when the step that used it is done, not when it is handed out. The reader keeps
both places: where it has read to, and where the last step left the data.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from muster.contracts.position import HASH_MODULUS, Position
from muster.datasets.lines import line_hash
from muster.datasets.reader import read_lines
from muster.datasets.samples import parse_sample


class SampleReader:
    """Goes through a rank's own shards, pass after pass, from any position."""

    def __init__(self, find_shards: Callable[[], Sequence[Path]], epochs: int) -> None:
        """`find_shards` is called when the first sample is wanted: a program may need no data."""
        self._find_shards = find_shards
        self._epochs = epochs
        self.committed = Position()
        self._epoch = self._shard_idx = self._line_idx = 0
        self._consumed = self._consumed_hash = 0

    def go_to(self, position: Position) -> None:
        """Read on from `position`, as if everything before it had just been consumed."""
        self.committed = position
        self._epoch = position.epoch
        self._shard_idx, self._line_idx = position.shard_idx, position.line_idx
        self._consumed, self._consumed_hash = position.consumed, position.consumed_hash

    def commit(self) -> None:
        """Count everything handed out so far as consumed by the step that is now done."""
        self.committed = Position(
            step=self.committed.step + 1,
            epoch=self._epoch,
            shard_idx=self._shard_idx,
            line_idx=self._line_idx,
            consumed=self._consumed,
            consumed_hash=self._consumed_hash % HASH_MODULUS,
        )

    def batches(self, size: int, decoder: msgspec.json.Decoder[Any]) -> Iterator[list[Any]]:
        """Yield `size` samples at a time; the last batch of a pass may be smaller, never empty.

        Begins where the last step left the data: what was handed out without a step comes again.
        """
        if size < 1:
            raise ValueError(f"a batch has at least one sample, not {size}")
        self.go_to(self.committed)
        while self._epoch < self._epochs:
            batch = []
            for sample in self._rest_of_epoch(decoder):
                batch.append(sample)
                if len(batch) == size:
                    yield batch
                    batch = []
            if batch:
                yield batch
            self._next_epoch()

    def _rest_of_epoch(self, decoder: msgspec.json.Decoder[Any]) -> Iterator[Any]:
        here = Position(shard_idx=self._shard_idx, line_idx=self._line_idx)
        shards = self._find_shards()
        for line, shard_idx, line_idx in read_lines(shards, here):
            sample = parse_sample(line, decoder, shard=shards[shard_idx], line_number=line_idx)
            self._shard_idx, self._line_idx = shard_idx, line_idx
            self._consumed += 1
            self._consumed_hash += line_hash(line)
            yield sample

    def _next_epoch(self) -> None:
        """Begin anew. The committed position stays at the end of the last pass until a step."""
        self._epoch += 1
        self._shard_idx = self._line_idx = 0
        self._consumed = self._consumed_hash = 0
