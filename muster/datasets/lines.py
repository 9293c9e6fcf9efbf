"""From the bytes of a shard to its lines: the hot path under the index and the reader.

A line is what lies between two newlines, byte for byte (a carriage return belongs to it, no
encoding is assumed); a last line needs no newline. Work is done a block at a time, by functions
that run in C, and memory is bounded by one block or one line, whichever is longer.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from muster.datasets.errors import InvalidSample, ShardChanged, ShardUnreadable

BLOCK_BYTES: Final = 256 * 1024
"""Large enough that system calls do not matter, small enough to stay in the processor's cache."""

LINE_LIMIT_BYTES: Final = 64 * 1024 * 1024
"""No sample is longer: without a limit, a file without newlines would be read into memory whole."""


class Fingerprint(NamedTuple):
    """What tells one content of a shard from the next without reading it."""

    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> "Fingerprint":
        return cls(facts.st_size, facts.st_mtime_ns)


class Line(NamedTuple):
    """One line as it was read, without its newline, and where from."""

    content: bytes
    shard: Path
    number: int
    """Counted from 1 within its shard, as an editor shows it."""


def line_hash(line: bytes) -> int:
    """Return the 64-bit hash of one line, taken without its newline, that the audit adds up."""
    return xxhash.xxh3_64_intdigest(line)


def fingerprint_of(shard: Path) -> Fingerprint:
    """Return the fingerprint of a shard, or raise `ShardUnreadable`."""
    with reading(shard):
        return Fingerprint.of(shard.stat())


@contextmanager
def reading(shard: Path) -> Iterator[None]:
    """Turn what the system says about `shard` into `ShardUnreadable`."""
    try:
        yield
    except OSError as error:
        raise ShardUnreadable(shard, error) from error


def blocks_of_shard(
    shard: Path, fingerprint: Fingerprint, *, offset: int = 0, line_idx: int = 0
) -> Iterator[list[bytes]]:
    """Yield the lines of `shard` from a byte offset to the end, many at a time.

    `offset` must be where line `line_idx` begins. Raises `ShardChanged` before it yields
    anything that was read from other content than `fingerprint` stands for, and
    `ShardUnreadable`, or `InvalidSample` for a line above `LINE_LIMIT_BYTES`.
    """
    pieces: list[bytes] = []  # of a line that goes on in the next block
    pieces_bytes = 0
    for block in _blocks(shard, fingerprint, offset):
        lines = block.split(b"\n")
        pieces.append(lines[0])
        pieces_bytes += len(lines[0])
        if pieces_bytes > LINE_LIMIT_BYTES:
            problem = f"longer than {LINE_LIMIT_BYTES} bytes"
            raise InvalidSample(shard, line_idx + 1, problem, pieces[0])
        if len(lines) == 1:
            continue
        lines[0] = b"".join(pieces)
        pieces = [lines.pop()]
        pieces_bytes = len(pieces[0])
        line_idx += len(lines)
        yield lines
    if pieces_bytes:
        yield [b"".join(pieces)]


def _blocks(shard: Path, fingerprint: Fingerprint, offset: int) -> Iterator[bytes]:
    with reading(shard), FileIO(shard) as file:
        _check_unchanged(file, shard, fingerprint)
        _check_line_start(file, shard, fingerprint, offset)
        file.seek(offset)
        while block := file.read(BLOCK_BYTES):
            _check_unchanged(file, shard, fingerprint)
            yield block
        _check_unchanged(file, shard, fingerprint)


def _check_unchanged(file: FileIO, shard: Path, fingerprint: Fingerprint) -> None:
    if Fingerprint.of(os.fstat(file.fileno())) != fingerprint:
        raise ShardChanged(shard, "changed while it was being read")


def _check_line_start(file: FileIO, shard: Path, fingerprint: Fingerprint, offset: int) -> None:
    """Refuse an offset in the middle of a line: the index that named it is damaged."""
    inside = 0 < offset < fingerprint.size_bytes
    if inside and os.pread(file.fileno(), 1, offset - 1) != b"\n":
        raise ShardChanged(shard, f"has no line that begins at byte {offset}, as its index says")
