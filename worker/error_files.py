"""The error that a program has written down before it ended, as torch's `@record` does.

The file is a stranger's work: it may be anything, half of it, or no file at all. Then nothing was
written down, and the end of the log has to do.
"""

import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from muster.contracts.messages import ERROR_LIMIT

FILE_LIMIT_BYTES: Final = 1 << 20
"""More than any traceback is long; a longer file is not read."""

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Nobody is waited for, should it be a pipe."""


class _Said(msgspec.Struct):
    message: str


class _ErrorFile(msgspec.Struct):
    """What is of interest in it; the rest, a traceback among it, is in the log as well."""

    message: _Said | str


_DECODER: Final = msgspec.json.Decoder(_ErrorFile)


def error_in(path: Path) -> str | None:
    """Return the error in one line or several, bounded; None if there is none that makes sense."""
    try:
        said = _DECODER.decode(_content(path)).message
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    words = said if isinstance(said, str) else said.message
    return words.strip()[:ERROR_LIMIT] or None


def _content(path: Path) -> bytes:
    """Return what is in the file; nothing if that is too much, or it is no file."""
    descriptor = os.open(path, _FLAGS)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_LIMIT_BYTES:
            return b""
        return os.read(descriptor, FILE_LIMIT_BYTES)
    finally:
        os.close(descriptor)
