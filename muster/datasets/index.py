"""Lines of a shard, and its index: seek to any line, count and sum the hashes of all lines.

A line is the bytes between two newlines (a carriage return belongs to it, no encoding is assumed);
a last line needs no newline. Memory is bounded by one block or one line, whichever is longer.

An index lies beside its shard (``shard_00000.idx``), or in a private directory of this user where
the data set is read-only. One that is missing, damaged or older than its shard is built again. All
numbers are little-endian:

    magic 8 bytes · size of the shard u64 · its mtime in ns i64 · lines u64 ·
    sum of the xxh3 of every line modulo 2**64 u64 · offset of every line u64 each
"""

import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import xxhash

from muster.contracts.location import Location
from muster.contracts.shards import HASH_MODULUS
from muster.datasets.errors import DatasetNotWritable, InvalidSample, ShardChanged, ShardUnreadable
from muster.host.files import replacing

BLOCK_BYTES: Final = 256 * 1024
"""Large enough to make system calls cheap, small enough for the processor's cache."""

LINE_LIMIT_BYTES: Final = 64 * 1024 * 1024
"""Without a limit, a file without newlines would be read into memory as one line."""


class Fingerprint(NamedTuple):
    """Identifies a shard's content without reading it."""

    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> "Fingerprint":
        return cls(facts.st_size, facts.st_mtime_ns)


class Line(NamedTuple):
    """One line without its newline, and where it was read."""

    content: bytes
    shard: Location
    number: int  # counts from 1 within its shard, as in an editor


def line_hash(line: bytes) -> int:
    """Return the 64-bit hash of a line without its newline; the audit adds these up."""
    return xxhash.xxh3_64_intdigest(line)


def first_blank(lines: list[bytes]) -> int | None:
    """Return the place of the first blank line; a lone carriage return is blank, too."""
    return min((lines.index(blank) for blank in (b"", b"\r") if blank in lines), default=None)


def fingerprint_of(shard: Path) -> Fingerprint:
    """Return the fingerprint of a shard, or raise `ShardUnreadable`."""
    with shard_errors(shard):
        return Fingerprint.of(shard.stat())


@contextmanager
def shard_errors(shard: Path) -> Iterator[None]:
    """Turn an `OSError` into `ShardUnreadable`."""
    try:
        yield
    except OSError as error:
        raise ShardUnreadable(shard, error) from error


def blocks_of_shard(
    shard: Path, fingerprint: Fingerprint, *, offset: int = 0, line_idx: int = 0
) -> Iterator[list[bytes]]:
    """Yield the lines of `shard` from a byte offset to the end, many at a time.

    `offset` must be the start of line `line_idx`. Raises `ShardChanged` before it yields content
    that does not match `fingerprint`, and `ShardUnreadable`, or `InvalidSample` for a line above
    `LINE_LIMIT_BYTES`.
    """
    pieces: list[bytes] = []  # of a line that continues in the next block
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
    with shard_errors(shard), FileIO(shard) as file:
        _check_unchanged(file, shard, fingerprint)
        inside = 0 < offset < fingerprint.size_bytes
        if inside and os.pread(file.fileno(), 1, offset - 1) != b"\n":
            problem = f"has no line that begins at byte {offset}, as its index says"
            raise ShardChanged(shard, problem)
        file.seek(offset)
        while block := file.read(BLOCK_BYTES):
            _check_unchanged(file, shard, fingerprint)
            yield block
        _check_unchanged(file, shard, fingerprint)


def _check_unchanged(file: FileIO, shard: Path, fingerprint: Fingerprint) -> None:
    if Fingerprint.of(os.fstat(file.fileno())) != fingerprint:
        raise ShardChanged(shard, "changed while it was being read")


_MAGIC: Final = b"MUSIDX01"
_HEADER: Final = struct.Struct("<8sQqQQ")
_OFFSET: Final = struct.Struct("<Q")
_SPAN: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The number of lines and the sum of their hashes, which the audit compares."""

    lines: int
    hash_sum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The index of one shard. Keeps no file open and no offset in memory."""

    shard: Path
    place: Path  # the path of the index
    fingerprint: Fingerprint
    totals: Totals

    @classmethod
    def open(
        cls, shard: Path, private_directory: Path | None = None, shown: Location | None = None
    ) -> "ShardIndex":
        """Return the index of `shard` as it is now, building it if necessary.

        `shown` is where the user finds a shard that was downloaded, for errors about its lines.
        Any number of processes may do this at once. Raises `ShardUnreadable`, `ShardChanged` if
        the shard is being written, `InvalidSample` for a blank line, or `DatasetNotWritable` if no
        index can be written.
        """
        fingerprint = fingerprint_of(shard)
        private = private_directory or Path(tempfile.gettempdir()) / f"muster-index-{os.geteuid()}"
        places = (
            index_beside(shard),
            private / f"{xxhash.xxh3_128_hexdigest(os.fsencode(shard.absolute()))}.idx",
        )
        for place in places:
            found = _load(shard, place)
            if found is not None and found.fingerprint == fingerprint:
                return found
        try:
            return cls.build(shard, places[0], shown)
        except OSError:  # a read-only or full file system
            pass
        try:
            _make_private(private)
            return cls.build(shard, places[1], shown)
        except OSError as error:
            why = f"{error.strerror or error}; the index of {shard} needs a writable TMPDIR"
            raise DatasetNotWritable(places[1], why) from error

    @classmethod
    def build(cls, shard: Path, place: Path, shown: Location | None = None) -> "ShardIndex":
        """Read `shard` once and write its index to `place`; raises `OSError` if that fails."""
        fingerprint = fingerprint_of(shard)
        with replacing(place) as file:  # not flushed: it can be built again
            file.write(bytes(_HEADER.size))
            totals = _write_offsets(file, shard, fingerprint, shown or shard)
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, *fingerprint, totals.lines, totals.hash_sum))
        return cls(shard=shard, place=place, fingerprint=fingerprint, totals=totals)

    def offset(self, line_idx: int) -> int:
        """Return the byte at which a line begins; for `lines` itself, the end of the shard.

        Raises `ShardChanged` if the index was replaced by that of other content.
        """
        lines = self.totals.lines
        if not 0 <= line_idx <= lines:
            raise IndexError(f"line {line_idx} is not in [0, {lines}]")
        if line_idx == lines:
            return self.fingerprint.size_bytes
        with closing(Offsets(self)) as offsets:
            return offsets.span(line_idx)[0]


class Offsets:
    """An open index. Every look-up reads from the file, so memory does not grow with the shard."""

    def __init__(self, index: ShardIndex) -> None:
        """Raise `ShardChanged`, see `ShardIndex.offset`."""
        self._index = index
        # An open index never changes: a new index replaces the file, not its bytes.
        with shard_errors(index.place):
            self._file = FileIO(index.place)
        if _loaded(index.shard, index.place, self._file) != index:
            self._file.close()
            raise ShardChanged(index.shard, "was indexed again while it was in use")

    def span(self, line_idx: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of a line of the shard, with its newline."""
        place = _HEADER.size + _OFFSET.size * line_idx
        pair = os.pread(self._file.fileno(), 2 * _OFFSET.size, place)
        if line_idx + 1 < self._index.totals.lines:
            return _SPAN.unpack(pair)
        return _OFFSET.unpack(pair)[0], self._index.fingerprint.size_bytes

    def close(self) -> None:
        self._file.close()


def index_beside(shard: Path) -> Path:
    """Return the usual place of a shard's index."""
    return shard.with_suffix(".idx")


def _write_offsets(
    file: BinaryIO, shard: Path, fingerprint: Fingerprint, shown: Location
) -> Totals:
    count = hash_sum = end = 0
    for lines in blocks_of_shard(shard, fingerprint):
        if (blank_idx := first_blank(lines)) is not None:
            raise InvalidSample(shown, count + blank_idx + 1, "the line is blank")
        # Line i of the block starts after the bytes of the i lines before it and their newlines.
        starts = map(add, accumulate(map(len, lines), initial=end), range(len(lines) + 1))
        *offsets, end = starts
        file.write(struct.pack(f"<{len(offsets)}Q", *offsets))
        count += len(lines)
        hash_sum += sum(map(xxhash.xxh3_64_intdigest, lines))
    return Totals(lines=count, hash_sum=hash_sum % HASH_MODULUS)


def _load(shard: Path, place: Path) -> ShardIndex | None:
    """Return the index at `place`, or None if it is missing or damaged."""
    try:
        with FileIO(place) as file:
            return _loaded(shard, place, file)
    except OSError:
        return None


def _loaded(shard: Path, place: Path, file: FileIO) -> ShardIndex | None:
    header = file.read(_HEADER.size)
    size_bytes = os.fstat(file.fileno()).st_size
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        return None
    _, shard_bytes, modified_ns, lines, hash_sum = _HEADER.unpack(header)
    if size_bytes != _HEADER.size + _OFFSET.size * lines:
        return None
    return ShardIndex(
        shard=shard,
        place=place,
        fingerprint=Fingerprint(shard_bytes, modified_ns),
        totals=Totals(lines=lines, hash_sum=hash_sum),
    )


def _make_private(directory: Path) -> None:
    """Make `directory`, or refuse one that another user can write to."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = directory.lstat()
    shared = facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if shared or not stat.S_ISDIR(facts.st_mode):
        raise PermissionError(f"{directory} belongs to another user")
