"""Files in places of ours that a program of the same user may have put there, or replaced.

Such a file may be anything: half of what was meant, a pipe that nobody writes to, forty gigabytes.
Nobody waits for it or runs out of memory; what no writer of ours would have left counts as nothing.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NAMED_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_file(path: Path | str, where: int | None = None) -> int:
    """Return the descriptor of a file to read, which lies in the directory `where` if relative.

    Raises OSError, of a link and of what is no file as well.
    """
    descriptor = os.open(path, _FILE, dir_fd=where)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_directory(path: Path | str, where: int | None = None) -> int:
    """Return the descriptor of a directory; raises OSError, of a link as well."""
    return os.open(path, _NAMED_DIRECTORY | os.O_NOFOLLOW, dir_fd=where)


def open_named_directory(path: Path) -> int:
    """Return the descriptor of a directory that a person has named, and may have as a link."""
    return os.open(path, _NAMED_DIRECTORY)


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor in the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def content_of(path: Path, limit_bytes: int) -> bytes:
    """Return what is in the file; nothing if it is longer, cannot be read, or is no file."""
    try:
        with open(open_file(path), "rb", buffering=0) as content:
            size_bytes = os.fstat(content.fileno()).st_size
            return content.read(size_bytes) if size_bytes <= limit_bytes else b""
    except OSError:
        return b""
