"""Open files that a job's program may have replaced (no links, no pipes), and other file calls."""

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO, Final

from muster.contracts.messages.attach import ProbeFile

# O_NONBLOCK: opening a named pipe must not wait for a writer.
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
LOG_LIMIT_BYTES: Final = 8 << 20

KEEP_SIZE: Final = 1  # fallocate(2)
PUNCH_HOLE: Final = 2

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_file(path: Path | str, where: int | None = None) -> int:
    """Return a descriptor of a regular file, relative to the directory descriptor `where`.

    Raises OSError, also for a symbolic link or anything that is not a regular file.
    """
    descriptor = os.open(path, _FILE, dir_fd=where)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_directory(path: Path | str, where: int | None = None) -> int:
    """Return a descriptor of a directory; raises OSError, also for a symbolic link."""
    return os.open(path, _DIRECTORY | os.O_NOFOLLOW, dir_fd=where)


def open_named_directory(path: Path | str) -> int:
    """Return a descriptor of a directory that a person has named, which may be a link."""
    return os.open(path, _DIRECTORY)


def fallocate(descriptor: int, mode: int, start: int, length: int) -> None:
    """Call the system; the standard library has only one of the modes. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, mode, ctypes.c_int64(start), ctypes.c_int64(length)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate failed")


def rotate(log: Path) -> None:
    """Move what a log of the services contains to a file with ``.1`` at its end if it is long.

    Its writers have it open for appending, so it is copied and truncated; only what they write
    between the two is lost, well below a millisecond.
    """
    with suppress(OSError):  # it is missing, or the disk is full
        if log.stat().st_size <= LOG_LIMIT_BYTES:
            return
        kept = log.with_name(f"{log.name}.1")
        kept.touch(mode=0o600)
        with log.open("rb+", buffering=0) as content, kept.open("wb") as copy:
            shutil.copyfileobj(content, copy)
            copy.flush()  # a full disk must be noticed before the content is gone
            shutil.copyfileobj(content, copy)
            content.truncate(0)


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def replace_private(path: Path, content: bytes) -> None:
    """Replace a file that is for this user alone, see `replacing`. Raises OSError."""
    with replacing(path, 0o600) as file:
        file.write(content)


def create_private(path: Path, content: bytes) -> None:
    """Make a file that only this user can read, whole or not at all.

    Raises OSError, `FileExistsError` if there is one, which stays as it is.
    """
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as made:  # mode 0600
        made.write(content)
        made.flush()
        os.fsync(made.fileno())
        os.link(made.name, path)  # a link, unlike a rename, replaces nothing


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the block ends, unless it raises.

    Readers find the old content or the new one, never a part. It survives every process, but need
    not survive a power cut: nothing is flushed (`muster.checkpoints.local.replace_file` does that).
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb", opener=lambda at, flags: os.open(at, flags, mode)) as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def existing(directory: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    return next(place for place in (directory, *directory.parents) if place.exists())


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return what no file at this path on another disk has, too; None if there is no file."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def write_probe_file(probe: ProbeFile) -> None:
    """Put a file into a directory, which is created if it is missing. Raises OSError."""
    directory = Path(probe.directory)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / probe.name).open("x") as file:
        file.write(probe.content)


def remove_probe_file(probe: ProbeFile) -> None:
    with suppress(OSError):
        Path(probe.directory, probe.name).unlink(missing_ok=True)


def shares_directory(probe: ProbeFile) -> bool:
    """Return whether this host sees the file in the same directory, and may write there."""
    with suppress(OSError, UnicodeDecodeError):
        found = Path(probe.directory, probe.name).read_text()
        return found == probe.content and os.access(probe.directory, os.W_OK | os.X_OK)
    return False
