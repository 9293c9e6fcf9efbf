"""Whose fault it is that a rank cannot be started: what was submitted, or the moment.

A directory that does not exist will not exist in a second either. A process, a descriptor, memory
or room on a disk may be there again: only the host had none. So may a file of ours, a log or the
interpreter of an environment that is being installed anew, and nothing was wrong with the job.
"""

import errno
import os
from collections.abc import Mapping
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

ALL_BYTES_MAX: Final = 6 << 20
ONE_BYTES_MAX: Final = 128 << 10
POINTER_BYTES: Final = 9
"""What Linux takes at most, of all and of one string, and what each costs besides: execve(2)."""


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


def explained(error: OSError, environment: Mapping[str, str]) -> OSError:
    """Return the error, with the figures where a command and its environment are too large.

    The kernel names the interpreter, which is not the matter. No value is told.
    """
    if error.errno != errno.E2BIG:
        return error
    sizes = {
        name: len(os.fsencode(f"{name}={value}")) + POINTER_BYTES
        for name, value in environment.items()
    }
    longest = max(sizes, key=sizes.__getitem__, default="")
    limit = min(os.sysconf("SC_ARG_MAX"), ALL_BYTES_MAX)
    said = (
        f"env and secrets are {sum(sizes.values())} bytes, the longest is {longest} with "
        f"{sizes.get(longest, 0)}; with the command the system takes {limit}, of which "
        f"{ONE_BYTES_MAX} in one: hand over a file's path in place of its content"
    )
    return OSError(errno.E2BIG, said)
