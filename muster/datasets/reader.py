"""Reads the lines of a rank's shards from an exact position.

The consumer takes as many lines as a step needs and saves the position that came with the last one:
reading from there again yields exactly the rest.
"""

from collections.abc import Callable, Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from muster.contracts.location import Location
from muster.contracts.shards import HASH_MODULUS, Position, Reading
from muster.datasets.errors import InvalidSample, ShardChanged
from muster.datasets.index import (
    Fingerprint,
    ShardIndex,
    blocks_of_shard,
    fingerprint_of,
    first_blank,
    line_hash,
)
from muster.datasets.source import DataSource

Sample = TypeVar("Sample")

WHOLE: Final = Reading()
"""All shards, once."""


def read_lines(
    source: DataSource, position: Position, reading: Reading = WHOLE
) -> Iterator[tuple[bytes, int, int]]:
    """Yield every line from `position` on as ``(line, shard_idx, line_idx)`` *after* that line.

    Lines come without their newline, in the order of the rank's shards; memory is bounded by a
    block of lines. A shard is fetched when the reading gets there, and then it raises
    `ShardUnreadable`, `ShardChanged` if the shard is not the one that `position` refers to, and
    `InvalidSample` for a blank line. The index is needed only to start in the middle of a shard.
    """
    shards = reading.shard_idxs(len(source.shards))
    if (position.shard_idx, position.line_idx) > (len(shards), 0):
        raise ShardChanged(
            source.location,
            f"has lost shards: this rank was in its shard {position.shard_idx} (from 0), and now "
            f"has {len(shards)}",
        )
    for shard_idx in range(position.shard_idx, len(shards)):
        line_idx = position.line_idx if shard_idx == position.shard_idx else 0
        shard = source.path(shards[shard_idx], reading)
        shown = source.location / source.shards[shards[shard_idx]].name
        fingerprint, offset = _start(shard, line_idx, shown)
        for lines in blocks_of_shard(shard, fingerprint, offset=offset, line_idx=line_idx):
            blank_idx = first_blank(lines)
            yield from zip(lines[:blank_idx], repeat(shard_idx), count(line_idx + 1))
            if blank_idx is not None:
                raise InvalidSample(shown, line_idx + blank_idx + 1, "the line is blank")
            line_idx += len(lines)


def locations(source: DataSource, reading: Reading) -> list[Location]:
    """Return where the user finds each of the rank's shards."""
    return [
        source.location / source.shards[idx].name for idx in reading.shard_idxs(len(source.shards))
    ]


def _start(shard: Path, line_idx: int, shown: Location) -> tuple[Fingerprint, int]:
    """Return the shard's fingerprint, and the byte where line `line_idx` starts."""
    if line_idx == 0:
        return fingerprint_of(shard), 0
    index = ShardIndex.open(shard, shown=shown)
    if line_idx > (lines := index.totals.lines):
        raise ShardChanged(shard, f"has {lines} lines, but {line_idx} were already consumed")
    return index.fingerprint, index.offset(line_idx)


def parse_sample(
    line: bytes, decoder: msgspec.json.Decoder[Sample], *, shard: Location, line_number: int
) -> Sample:
    """Return the decoded sample (``Decoder()`` takes any JSON), or raise `InvalidSample`.

    `line_number` counts from 1: it is the `line_idx` that `read_lines` yields with the line.
    """
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSample(shard, line_number, f"invalid sample: {error}", line) from error


class SampleReader:
    """Reads a rank's own shards, epoch after epoch, from any position.

    A sample counts as consumed when the step that used it is committed, so the reader keeps two
    places: where it has read to, and where the last step ended.
    """

    def __init__(
        self, find_source: Callable[[], DataSource], epochs: int, reading: Reading = WHOLE
    ) -> None:
        """`find_source` is called when the first sample is read: a program may need no data."""
        self._reading = reading
        self._find_source = find_source
        self._epochs = epochs
        self.committed = Position()
        self.epoch = self._shard_idx = self._line_idx = 0
        self._consumed = self._consumed_hash = 0

    def go_to(self, position: Position) -> None:
        """Continue from `position`, as if everything before it had just been consumed."""
        self.committed = position
        self.epoch = position.epoch
        self._shard_idx, self._line_idx = position.shard_idx, position.line_idx
        self._consumed, self._consumed_hash = position.consumed, position.consumed_hash

    def commit(self) -> None:
        """Count everything read so far as consumed by the step that is now done."""
        self.committed = Position(
            step=self.committed.step + 1,
            epoch=self.epoch,
            shard_idx=self._shard_idx,
            line_idx=self._line_idx,
            consumed=self._consumed,
            consumed_hash=self._consumed_hash % HASH_MODULUS,
        )

    def batches(self, size: int, decoder: msgspec.json.Decoder[Any]) -> Iterator[list[Any]]:
        """Yield `size` samples at a time; the last batch of an epoch may be smaller, never empty.

        Starts at the committed position, so samples that were read without a step come again.
        """
        if size < 1:
            raise ValueError(f"a batch has at least one sample, not {size}")
        self.go_to(self.committed)
        while self.epoch < self._epochs:
            batch = []
            for sample in self._rest_of_epoch(decoder):
                batch.append(sample)
                if len(batch) == size:
                    yield batch
                    batch = []
            if batch:
                yield batch
            # The committed position stays at the end of the last epoch until a step.
            self.epoch += 1
            self._shard_idx = self._line_idx = 0
            self._consumed = self._consumed_hash = 0

    def _rest_of_epoch(self, decoder: msgspec.json.Decoder[Any]) -> Iterator[Any]:
        here = Position(shard_idx=self._shard_idx, line_idx=self._line_idx)
        source = self._find_source()
        reading = replace(self._reading, epochs_left=self._epochs - self.epoch - 1)
        shown = locations(source, reading)
        for line, shard_idx, line_idx in read_lines(source, here, reading):
            sample = parse_sample(line, decoder, shard=shown[shard_idx], line_number=line_idx)
            self._shard_idx, self._line_idx = shard_idx, line_idx
            self._consumed += 1
            self._consumed_hash += line_hash(line)
            yield sample
