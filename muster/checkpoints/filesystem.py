"""The port through which every checkpoint operation reaches a disk.

It is as fine as the system call, so that a test can record each one, fail each one and cut the
power between any two. Foreign errors are mapped above it: here an error is an `OSError`.
"""
# The system calls themselves: pathlib would only add a layer, and its time.
# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH208

import errno
import os
import stat
from typing import Final, Protocol, TypeAlias

from muster.strange_files import closing, open_file

Data: TypeAlias = bytes | bytearray | memoryview

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
"""Weights and data positions are nobody else's business."""


class FileSystem(Protocol):
    """What a checkpoint needs of a disk. Every method raises `OSError` and changes nothing then.

    Nothing is promised to survive a power cut but the bytes of a file after `fsync` of its
    descriptor, and the entries of a directory after `fsync_directory`.
    """

    def make_directory(self, path: str) -> None:
        """Make one directory; its parent must exist and it must not."""

    def is_directory(self, path: str) -> bool:
        """Return whether `path` is a directory, reached through no symbolic link at its end."""

    def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, in no order."""

    def fsync_directory(self, path: str) -> None:
        """Make the entries of a directory durable, but not what they lead to."""

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""

    def create(self, path: str) -> int:
        """Create a file that must not exist, follow no link, and return its descriptor."""

    def overwrite(self, path: str, size_bytes: int) -> int:
        """Open a file to be written over from its first byte; return its descriptor.

        What it holds beyond `size_bytes` is thrown away.
        """

    def write(self, descriptor: int, data: Data) -> int:
        """Write on and return how many bytes were taken: it may be fewer than given."""

    def fsync(self, descriptor: int) -> None:
        """Make all bytes written so far durable, and the length; not the time of change.

        After an error they may be lost for good and a second try may lie: throw the file away.
        """

    def close(self, descriptor: int) -> None:
        """Give the descriptor back; it is gone even when this raises."""

    def read(self, path: str, limit_bytes: int) -> bytearray:
        """Return a regular file's content; one above the limit is refused before allocation."""

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
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, FILE_MODE)

    def overwrite(self, path: str, size_bytes: int) -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # Asked first: a truncation that changes nothing is still an entry in the journal.
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
            return _read_all(descriptor, size_bytes)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove_file(self, path: str) -> None:
        os.unlink(path)


def _read_all(descriptor: int, size_bytes: int) -> bytearray:
    content = bytearray(size_bytes)
    filled = 0
    with memoryview(content) as view:
        while filled < size_bytes:
            taken = os.readv(descriptor, [view[filled:]])
            if taken == 0:
                break
            filled += taken
    del content[filled:]
    return content
