"""Whether the name of an open file still leads to it.

Who has a file open keeps it, though it was removed, moved or replaced: a database is read on, a
lock is held on, and nobody else will ever find either. So whoever relies on a name looks again.
"""

import os
from enum import Enum, auto
from pathlib import Path


class Loss(Enum):
    """What became of the name."""

    GONE = auto()
    """Nothing is there: the file, or a directory above it, was removed or moved."""
    REPLACED = auto()
    """Another file is there."""


def loss_of(path: Path, opened: os.stat_result) -> Loss | None:
    """Return how the file that was `opened` by this name is lost; None unless that is certain."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Loss.GONE
    except OSError:  # that it cannot be looked at now does not mean that it is another one
        return None
    return None if os.path.samestat(found, opened) else Loss.REPLACED
