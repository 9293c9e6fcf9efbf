"""Whose fault it is that a rank cannot be started: what was submitted, or the moment.

A directory that does not exist will not exist in a second either. A process, a descriptor, memory
or room on a disk may be there again: only the host had none. So may a file of ours, a log or the
interpreter of an environment that is being installed anew, and nothing was wrong with the job.
"""

import errno
from pathlib import Path
from typing import Final

_OF_THE_SUBMISSION: Final = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.E2BIG,
        errno.ENAMETOOLONG,
        errno.ENOEXEC,
        errno.ELOOP,
        errno.EINVAL,
    }
)
"""What the kernel says of a working directory, a command or an environment."""


def is_of_the_command(error: OSError) -> bool:
    """Return whether a command, which could not be run, will only meet the same error again."""
    return error.errno in _OF_THE_SUBMISSION


def is_of_the_order(error: OSError, working_dir: str) -> bool:
    """Return whether another start there, with the same environment, would meet the same error.

    All else that a start needs is ours. The error names the file that was the matter.
    """
    if error.errno == errno.E2BIG:
        return True
    is_there = error.filename is not None and Path(error.filename) == Path(working_dir)
    return is_there and error.errno in _OF_THE_SUBMISSION
