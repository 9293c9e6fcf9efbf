"""Limits that our processes change for themselves only: open files and the umask.

Shells allow 1024 open files, too few for an agent of hundreds of ranks. But select() fails with
descriptors above 1023, so programs must not inherit a raised limit. Our files are for our user
alone; those of a program are as open as the user's umask allows.
"""

import os
import resource
from contextlib import suppress
from typing import NamedTuple, Self


class ShellLimits(NamedTuple):
    """RLIMIT_NOFILE and the umask of a process."""

    soft: int
    hard: int
    umask: int = -1  # unchanged, as for `Popen`

    @classmethod
    def replaced(cls) -> Self:
        """Raise this process's limit on open files and close its umask; return what was before."""
        before = cls(*resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0o077))
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before.hard, before.hard))
        return before

    def apply_to(self, pid: int) -> None:
        """Set the limit on open files of a process that has just started."""
        with suppress(OSError):  # it has exited already, or belongs to another user by now
            resource.prlimit(pid, resource.RLIMIT_NOFILE, self[:2])
