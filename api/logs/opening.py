"""The way to a log: through the job's own directories, and through no link.

A program may put links in the place of its logs, or of the directory that they are in. It can read
what they lead to, being of the service's user; who reads its logs here may not.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Final

_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY: Final = _FILE | os.O_DIRECTORY

OWN_DEPTH: Final = 2
"""Directories on the way that are the job's: its own, and that of its logs."""


def open_log(path: Path) -> int:
    """Return the descriptor of a log, or of what lies beside one. Raises OSError."""
    *above, name = path.parts[-OWN_DEPTH - 1 :]
    directory = os.open(path.parents[OWN_DEPTH], _DIRECTORY & ~os.O_NOFOLLOW)
    try:
        for part in above:
            inner = os.open(part, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        log = os.open(name, _FILE, dir_fd=directory)
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(log).st_mode):
        os.close(log)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return log
