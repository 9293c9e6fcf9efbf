"""Whose fault it is that a rank cannot be started: what was submitted, or the moment.

A directory that does not exist will not exist in a second either. A process, a descriptor, memory
or room on a disk may be there again: only the host had none.
"""

import errno
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


def is_of_the_submission(error: OSError) -> bool:
    """Return whether another start would only meet the same error."""
    return error.errno in _OF_THE_SUBMISSION
