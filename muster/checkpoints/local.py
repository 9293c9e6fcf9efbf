"""The port through which every checkpoint operation reaches a disk, and durability on top of it.

The port is as fine as the system call, so that a test can record each call, fail each call and
cut the power between any two. Above it, durability is four named sequences:

    a file         create → write → fsync → close
    over another   open, truncate to the new length → write → fsync → close: a recycled file
    a new value    a temporary file, as above → rename over the old one → fsync of the directory
    a directory    each missing ancestor from the top, its parent flushed before it gets a child

On any error the temporary file is removed and the error is raised. A descriptor whose fsync failed
is never fsynced again and its file never renamed: the kernel may have marked the lost pages as
clean, and the next fsync would then report success.
"""
# The system calls themselves: pathlib would only add a layer, and its time.
# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH120, PTH208

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, Protocol, TypeAlias

from xxhash import xxh3_64

from muster.checkpoints.manifest import FileFacts
from muster.host.files import closing, open_file, open_named_directory

Data: TypeAlias = bytes | bytearray | memoryview

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700  # weights are private to their user

PIECE_BYTES: Final = 1 << 20
"""Hashed and then written while still in the processor's cache; small buffers are joined up to
this size, so that many small arrays cost one write."""

UNFINISHED: Final = f"*.{'[0-9a-f]' * 16}.tmp"
"""A glob pattern for the temporary files that a killed `replace_file` leaves."""


class FileSystem(Protocol):
    """What a checkpoint needs of a disk. A method that raises `OSError` has changed nothing.

    Only two things survive a power cut for certain: the bytes of a file after `fsync` of its
    descriptor, and the entries of a directory after `fsync_directory`.
    """

    def make_directory(self, path: str) -> None:
        """Make one directory; its parent must exist and it must not."""

    def is_directory(self, path: str) -> bool:
        """Return whether `path` is a directory and not a symbolic link."""

    def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, in no order."""

    def fsync_directory(self, path: str) -> None:
        """Make the entries of a directory durable, but not their contents."""

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""

    def create(self, path: str) -> int:
        """Create a file that must not exist, follow no link, and return its descriptor."""

    def overwrite(self, path: str, size_bytes: int) -> int:
        """Open a file to write it again from its first byte; return its descriptor.

        Bytes beyond `size_bytes` are cut off.
        """

    def write(self, descriptor: int, data: Data) -> int:
        """Write on and return how many bytes were taken, possibly fewer than given."""

    def fsync(self, descriptor: int) -> None:
        """Make all bytes written so far durable, and the length; not the time of change.

        After an error the bytes may be lost and a second call may lie: throw the file away.
        """

    def close(self, descriptor: int) -> None:
        """Close the descriptor; it is gone even when this raises."""

    def read(self, path: str, limit_bytes: int) -> bytearray:
        """Return a regular file's content; raise before reading one above the limit."""

    def rename(self, source: str, target: str) -> None:
        """Move an entry in one step. A file replaces a file; a directory needs a free name."""

    def remove_file(self, path: str) -> None:
        """Remove the entry of a file."""


class LocalFileSystem:
    """The machine's own file system."""

    def make_directory(self, path: str) -> None:
        os.mkdir(path, DIRECTORY_MODE)

    def is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False

    def list_directory(self, path: str) -> list[str]:
        return os.listdir(path)

    def fsync_directory(self, path: str) -> None:
        with closing(open_named_directory(path)) as descriptor:
            os.fsync(descriptor)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, FILE_MODE)

    def overwrite(self, path: str, size_bytes: int) -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # Checked first: a truncation that changes nothing is still an entry in the journal.
            if os.fstat(descriptor).st_size > size_bytes:
                os.ftruncate(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, descriptor: int, data: Data) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, path: str, limit_bytes: int) -> bytearray:
        with closing(open_file(path)) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes > limit_bytes:
                raise OSError(errno.EFBIG, f"longer than {limit_bytes} bytes", path)
            content = bytearray(size_bytes)
            filled = 0
            with memoryview(content) as view:
                while filled < size_bytes and (taken := os.readv(descriptor, [view[filled:]])):
                    filled += taken
            del content[filled:]
            return content

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove_file(self, path: str) -> None:
        os.unlink(path)


def write_file(files: FileSystem, path: str, buffers: Iterable[memoryview]) -> FileFacts:
    """Create `path` with the buffers' bytes, durably (its entry is not: flush the directory)."""
    return _fill(files, path, files.create(path), buffers)


def rewrite_file(
    files: FileSystem, path: str, buffers: Iterable[memoryview], size_bytes: int
) -> FileFacts:
    """Overwrite `path`, whose content no reader trusts, with the buffers' bytes, durably."""
    return _fill(files, path, files.overwrite(path, size_bytes), buffers)


def replace_file(files: FileSystem, target: str, content: bytes) -> None:
    """Replace the content of `target` in one durable step.

    The temporary name is random, so the leftover of a killed process is in no one's way.
    """
    temporary = f"{target}.{os.urandom(8).hex()}.tmp"  # `secrets` takes an agent 5 ms to import
    write_file(files, temporary, [memoryview(content)])
    try:
        files.rename(temporary, target)
    except BaseException:
        with suppress(OSError):
            files.remove_file(temporary)
        raise
    files.fsync_directory(os.path.dirname(target))


def ensure_directory(files: FileSystem, path: str) -> None:
    """Make `path` and its missing ancestors, durably.

    An entry is flushed even if it exists: a process killed between mkdir and fsync may have left
    it. Since a parent is flushed before a child is made, an existing child proves all above it.
    """
    parent = os.path.dirname(path)
    found = files.is_directory(path)
    if not found:
        if parent != path:
            ensure_directory(files, parent)
        with suppress(FileExistsError):  # another rank may have been faster
            files.make_directory(path)
    try:
        files.fsync_directory(parent)
    except PermissionError:
        # Another user's directory that we may only walk through: that user keeps it durable.
        if not found:
            raise


def remove_tree(files: FileSystem, path: str) -> None:
    """Remove a directory of files; not durable, and harmless if interrupted."""
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


def _joined(buffers: list[memoryview]) -> Iterator[memoryview]:
    if len(buffers) == 1:
        yield buffers[0]
    elif buffers:
        yield memoryview(b"".join(buffers))


def _fill(
    files: FileSystem, path: str, descriptor: int, buffers: Iterable[memoryview]
) -> FileFacts:
    digest = xxh3_64()
    size_bytes = 0
    try:
        try:
            for piece in pieces(buffers):
                digest.update(piece)
                size_bytes += len(piece)
                rest = memoryview(piece)
                while rest:
                    written = files.write(descriptor, rest)
                    if written == 0:
                        raise OSError(errno.EIO, "the file takes no more bytes")
                    rest = rest[written:]
            files.fsync(descriptor)
        finally:
            files.close(descriptor)
    except BaseException:
        with suppress(OSError):
            files.remove_file(path)
        raise
    return FileFacts(size_bytes, digest.hexdigest())
