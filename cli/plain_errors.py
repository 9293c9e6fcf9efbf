"""Errors of the system, and texts that are none, as sentences: they are no bugs of ours.

Where a verb knows more of what was the matter, it says so itself and nothing comes here.
"""

import errno
import os
from typing import Final

from cli.misuse import Misuse
from muster.contracts.errors import MusterError

_OF_THE_PLACE: Final = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)
"""What the system says of a path that ought to be another one."""


class Thwarted(MusterError):
    """The system did not do what it was asked, and the words were right."""


def as_sentence(error: Exception) -> MusterError | None:
    """Return what to tell a person instead; None for what is not of the system, nor of a text."""
    if isinstance(error, UnicodeError):
        return Misuse(f"this is no text in UTF-8: {_shown(error)}")
    if not isinstance(error, OSError) or not error.strerror:
        return None
    if error.filename is not None:
        kind = Misuse if error.errno in _OF_THE_PLACE else Thwarted
        return kind(f"{os.fsdecode(error.filename)!r} cannot be used: {error.strerror}")
    if error.errno == errno.ENOENT:  # asking for it names no file
        return Misuse("the working directory is no more: change to another one")
    return Thwarted(f"what this writes or reads cannot be: {error.strerror}")


def _shown(error: UnicodeError) -> str:
    """Return the text in a form that can be printed anywhere."""
    return ascii(getattr(error, "object", str(error)))
