"""The line-offset index of a shard: seek to any line, count and sum the hashes of all of them.

An index lies beside its shard (``shard_00000.idx``), or in a private directory of this user
where the data set cannot be written. It can always be made again, so one that is missing,
damaged or older than its shard is simply replaced. All numbers are little-endian:

    magic 8 bytes · size of the shard u64 · its mtime in ns i64 · lines u64 ·
    sum of the xxh3 of every line modulo 2**64 u64 · offset of every line u64 each
"""

import os
import stat
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import BinaryIO, Final, Self

import xxhash

from muster.contracts.position import HASH_MODULUS
from muster.datasets.errors import DatasetNotWritable, ShardChanged
from muster.datasets.lines import Fingerprint, blocks_of_shard, fingerprint_of, reading
from muster.datasets.replacing import replacing

_MAGIC: Final = b"MUSIDX01"
_HEADER: Final = struct.Struct("<8sQqQQ")
_OFFSET: Final = struct.Struct("<Q")
_SPAN: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the audit compares: how many lines there are, and the sum of their hashes."""

    lines: int
    hash_sum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The facts of one shard. Keeps no file open and no offset in memory."""

    shard: Path
    place: Path
    """Where the index itself lies."""
    fingerprint: Fingerprint
    lines: int
    hash_sum: int

    @classmethod
    def open(cls, shard: Path, private_directory: Path | None = None) -> "ShardIndex":
        """Return the index of `shard` as it is now, building it if need be.

        Any number of processes may do this at once. Raises `ShardUnreadable`, `ShardChanged` if
        the shard is being written to, or `DatasetNotWritable` if there is no room for an index.
        """
        fingerprint = fingerprint_of(shard)
        private = private_directory or _default_private_directory()
        places = (index_beside(shard), private / f"{xxhash.xxh3_128_hexdigest(_name(shard))}.idx")
        for place in places:
            found = _load(shard, place)
            if found is not None and found.fingerprint == fingerprint:
                return found
        try:
            return cls.build(shard, places[0])
        except OSError:  # a read-only or full file system: nothing that matters is lost
            return _build_privately(shard, places[1])

    @classmethod
    def build(cls, shard: Path, place: Path) -> "ShardIndex":
        """Read `shard` once and write its index to `place`; raises `OSError` if that fails."""
        fingerprint = fingerprint_of(shard)
        with replacing(place) as file:
            file.write(bytes(_HEADER.size))
            totals = _write_offsets(file, shard, fingerprint)
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, *fingerprint, totals.lines, totals.hash_sum))
        return cls(
            shard=shard,
            place=place,
            fingerprint=fingerprint,
            lines=totals.lines,
            hash_sum=totals.hash_sum,
        )

    def offset(self, line_idx: int) -> int:
        """Return the byte at which a line begins; for `lines` itself, the end of the shard.

        Raises `ShardChanged` if the index has been replaced by that of another content.
        """
        if not 0 <= line_idx <= self.lines:
            raise IndexError(f"line {line_idx} is not in [0, {self.lines}]")
        if line_idx == self.lines:
            return self.fingerprint.size_bytes
        with self.offsets() as offsets:
            return offsets.span(line_idx)[0]

    def offsets(self) -> "Offsets":
        """Open the index for as many look-ups as one likes; raises `ShardChanged`, see `offset`."""
        return Offsets(self)


class Offsets:
    """An index kept open. Every look-up reads from the file: no memory grows with the shard."""

    def __init__(self, index: ShardIndex) -> None:
        self._index = index
        # What is opened here stays as it is: another index takes its place, never its bytes.
        with reading(index.place):
            self._file = FileIO(index.place)
        if _loaded(index.shard, index.place, self._file) != index:
            self._file.close()
            raise ShardChanged(index.shard, "was indexed anew while it was in use")

    def span(self, line_idx: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of a line of the shard, its newline among them."""
        place = _HEADER.size + _OFFSET.size * line_idx
        pair = os.pread(self._file.fileno(), 2 * _OFFSET.size, place)
        if line_idx + 1 < self._index.lines:
            return _SPAN.unpack(pair)
        return _OFFSET.unpack(pair)[0], self._index.fingerprint.size_bytes

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def index_beside(shard: Path) -> Path:
    """Return the usual place of a shard's index."""
    return shard.with_suffix(".idx")


def totals_of(shards: Iterable[Path]) -> Totals:
    """Return count and sum of hashes over `shards`, building the indexes that are missing."""
    lines = hash_sum = 0
    for shard in shards:
        index = ShardIndex.open(shard)
        lines += index.lines
        hash_sum += index.hash_sum
    return Totals(lines=lines, hash_sum=hash_sum % HASH_MODULUS)


def _write_offsets(file: BinaryIO, shard: Path, fingerprint: Fingerprint) -> Totals:
    count = hash_sum = end = 0
    for lines in blocks_of_shard(shard, fingerprint):
        # Line i of the block begins after the bytes of those before it and their i newlines.
        starts = map(add, accumulate(map(len, lines), initial=end), range(len(lines) + 1))
        *offsets, end = starts
        file.write(struct.pack(f"<{len(offsets)}Q", *offsets))
        count += len(lines)
        hash_sum += sum(map(xxhash.xxh3_64_intdigest, lines))
    return Totals(lines=count, hash_sum=hash_sum % HASH_MODULUS)


def _load(shard: Path, place: Path) -> ShardIndex | None:
    """Return the index at `place`, or None if there is none that is whole."""
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
        lines=lines,
        hash_sum=hash_sum,
    )


def _build_privately(shard: Path, place: Path) -> ShardIndex:
    try:
        _make_private(place.parent)
        return ShardIndex.build(shard, place)
    except OSError as error:
        raise DatasetNotWritable(
            place, f"{error.strerror or error}; the index of {shard} needs a writable TMPDIR"
        ) from error


def _default_private_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"muster-index-{os.geteuid()}"


def _make_private(directory: Path) -> None:
    """Make `directory`, or refuse one that another user may write to."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = directory.lstat()
    shared = facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if shared or not stat.S_ISDIR(facts.st_mode):
        raise PermissionError(f"{directory} belongs to somebody else")


def _name(shard: Path) -> bytes:
    return os.fsencode(shard.absolute())
