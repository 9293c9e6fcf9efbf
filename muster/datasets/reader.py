"""Lines with the position after each, from an exact resume point to the end of the epoch.

The consumer takes as many lines as a step needs and keeps the position that came with the last
one: that pair goes into the checkpoint, and reading from it again yields exactly the rest.
"""

from collections.abc import Iterator, Sequence
from itertools import count, repeat
from pathlib import Path
from typing import NamedTuple

from muster.contracts.position import Position
from muster.datasets.errors import InvalidSample, ShardChanged
from muster.datasets.index import ShardIndex
from muster.datasets.lines import Fingerprint, blocks_of_shard, fingerprint_of


class LineBlock(NamedTuple):
    """Consecutive lines of one shard; the first of them is line `line_idx`."""

    shard_idx: int
    line_idx: int
    lines: list[bytes]


def read_lines(shards: Sequence[Path], position: Position) -> Iterator[tuple[bytes, int, int]]:
    """Yield every line from `position` on as ``(line, shard_idx, line_idx)`` *after* that line.

    Lines come without their newline, in the order of `shards`; an empty shard is passed over.
    Raises what `read_blocks` raises, when the reading gets there and not before.
    """
    for block in read_blocks(shards, position):
        yield from zip(block.lines, repeat(block.shard_idx), count(block.line_idx + 1))


def read_blocks(shards: Sequence[Path], position: Position) -> Iterator[LineBlock]:
    """Yield the same lines many at a time; memory is bounded by a block, not by the data.

    Raises `ShardUnreadable`, `ShardChanged` if a shard is not (or no longer) the one that
    `position` was taken in, and `InvalidSample` for a blank line once all lines before it
    have been yielded. The index is needed only to begin in the middle of a shard.
    """
    _check_within(shards, position)
    for shard_idx in range(position.shard_idx, len(shards)):
        line_idx = position.line_idx if shard_idx == position.shard_idx else 0
        shard = shards[shard_idx]
        fingerprint, offset = _start(shard, line_idx)
        for lines in blocks_of_shard(shard, fingerprint, offset=offset, line_idx=line_idx):
            blank_idx = _first_blank(lines)
            if blank_idx:
                yield LineBlock(shard_idx, line_idx, lines[:blank_idx])
            if blank_idx is not None:
                raise InvalidSample(shard, line_idx + blank_idx + 1, "the line is blank")
            yield LineBlock(shard_idx, line_idx, lines)
            line_idx += len(lines)


def _check_within(shards: Sequence[Path], position: Position) -> None:
    if (position.shard_idx, position.line_idx) > (len(shards), 0):
        raise ShardChanged(
            shards[0].parent if shards else Path(),
            f"has lost shards: this rank stood in number {position.shard_idx} (from 0) of its "
            f"own, and now has {len(shards)}",
        )


def _start(shard: Path, line_idx: int) -> tuple[Fingerprint, int]:
    """Return what the shard must look like, and the byte where line `line_idx` begins."""
    if line_idx == 0:
        return fingerprint_of(shard), 0
    index = ShardIndex.open(shard)
    if line_idx > index.lines:
        raise ShardChanged(
            shard, f"has {index.lines} lines, but {line_idx} of them were already consumed"
        )
    return index.fingerprint, index.offset(line_idx)


def _first_blank(lines: list[bytes]) -> int | None:
    """Return where the first blank line is; a lone carriage return is blank as well."""
    blanks = [lines.index(blank) for blank in (b"", b"\r") if blank in lines]
    return min(blanks, default=None)
