"""Durability as named sequences.

A file:       create → write → fsync → close.
Over another: open, cut to the new length → write → fsync → close: of a file that nobody trusts.
A new value:  a temporary file, as above → rename over the old one → fsync of the directory.
A place:      each missing directory from the top, its parent flushed before anything is put in.

On any error what was temporary is removed and the error goes up. A descriptor whose fsync failed
is never fsynced again and its file never renamed: the kernel may have marked the lost pages as
clean, and the next fsync would then report success.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from xxhash import xxh3_64

from muster.checkpoints.filesystem import FileSystem

PIECE_BYTES: Final = 1 << 20
"""Hashed and then written while still in the processor's cache; small buffers are joined up to
this size, so that many small arrays cost one write."""

UNFINISHED: Final = f"*.{'[0-9a-f]' * 16}.tmp"
"""The names, as a shell's pattern, of what `replace_file` leaves when it is killed."""


class FileFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of a file."""

    size_bytes: int
    xxh3: str
    """16 hexadecimal digits."""


def write_file(files: FileSystem, path: str, buffers: Iterable[memoryview]) -> FileFacts:
    """Create `path` with the buffers' bytes, durable (its entry is not: flush the directory)."""
    return _filled(files, path, files.create(path), buffers)


def rewrite_file(files: FileSystem, path: str, buffers: Sequence[memoryview]) -> FileFacts:
    """Give `path`, which nobody trusts, the buffers' bytes in place, durable."""
    return _filled(files, path, files.overwrite(path, sum(map(len, buffers))), buffers)


def replace_file(files: FileSystem, target: str, content: bytes) -> None:
    """Give `target` a new content in one durable step.

    The temporary name is nobody else's: who was killed in between has left its own, which is in
    nobody's way.
    """
    temporary = f"{target}.{os.urandom(8).hex()}.tmp"  # `secrets` takes an agent 5 ms to import
    write_file(files, temporary, [memoryview(content)])
    try:
        files.rename(temporary, target)
    except BaseException:
        with suppress(OSError):
            files.remove_file(temporary)
        raise
    files.fsync_directory(os.path.dirname(target))  # noqa: PTH120  paths are strings in the port


def ensure_directory(files: FileSystem, path: str) -> None:
    """Make `path` and its missing ancestors, durable.

    An entry is flushed even where it was found: a process killed between mkdir and fsync may have
    left it. Because a parent is flushed before a child is made, one found child vouches for all
    above it.
    """
    parent = os.path.dirname(path)  # noqa: PTH120  paths are strings in the port
    found = files.is_directory(path)
    if not found:
        if parent != path:
            ensure_directory(files, parent)
        # Another rank may have been faster.
        with suppress(FileExistsError):
            files.make_directory(path)
    try:
        files.fsync_directory(parent)
    except PermissionError:
        # A directory that others own and we may only walk through: its entries are their care.
        if not found:
            raise


def remove_tree(files: FileSystem, path: str) -> None:
    """Remove a directory of files; not durable, and harmless when cut short."""
    for name in files.list_directory(path):
        files.remove_file(f"{path}/{name}")
    files.remove_directory(path)


def pieces(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes in pieces: long buffers cut, neighbouring short ones joined."""
    short: list[memoryview] = []
    short_bytes = 0
    for buffer in buffers:
        if short_bytes + len(buffer) <= PIECE_BYTES:
            short.append(buffer)
            short_bytes += len(buffer)
            continue
        yield from _joined(short)
        short, short_bytes = [], 0
        for start in range(0, len(buffer), PIECE_BYTES):
            yield buffer[start : start + PIECE_BYTES]
    yield from _joined(short)


def _filled(
    files: FileSystem, path: str, descriptor: int, buffers: Iterable[memoryview]
) -> FileFacts:
    digest = xxh3_64()
    size_bytes = 0
    try:
        try:
            for piece in pieces(buffers):
                digest.update(piece)
                size_bytes += len(piece)
                written = files.write(descriptor, piece)
                if written < len(piece):
                    _write_rest(files, descriptor, memoryview(piece)[written:])
            files.fsync(descriptor)
        finally:
            files.close(descriptor)
    except BaseException:
        with suppress(OSError):
            files.remove_file(path)
        raise
    return FileFacts(size_bytes, digest.hexdigest())


def _joined(buffers: list[memoryview]) -> Iterator[memoryview]:
    if len(buffers) == 1:
        yield buffers[0]
    elif buffers:
        yield memoryview(b"".join(buffers))


def _write_rest(files: FileSystem, descriptor: int, data: memoryview) -> None:
    while data:
        written = files.write(descriptor, data)
        if written == 0:
            raise OSError(errno.EIO, "the file takes no more bytes")
        data = data[written:]
