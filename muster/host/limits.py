"""Limits that our processes change for themselves only: open files and the umask.

Shells allow 1024 open files, too few for an agent of hundreds of ranks. But select() fails with
descriptors above 1023, so programs must not inherit a raised limit. Our files are for our user
alone; those of a program are as open as the user's umask allows.
"""

import os
import resource
from contextlib import suppress
from typing import Final, NamedTuple, Self

from muster.contracts.errors import MusterError

PER_RANK: Final = 3
"""Log, log index, channel."""

PER_AGENT: Final = 24
"""Everything else an agent, or a coordinator with a database, has open."""


class TooFewOpenFiles(MusterError):
    """The hard limit on open files is too low for this many ranks."""

    def __init__(self, ranks: int, needed: int, limit: int) -> None:
        super().__init__(
            f"a world size of {ranks} needs {needed} open files, but the limit is {limit}: use "
            f"fewer ranks, or raise it with `ulimit -n {needed}` in a new shell"
        )


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

    def refuse_too_many(self, ranks: int) -> None:
        """Raise `TooFewOpenFiles` if an agent could not hold this many ranks."""
        needed = PER_AGENT + PER_RANK * ranks
        if self.hard != resource.RLIM_INFINITY and self.hard < needed:
            raise TooFewOpenFiles(ranks, needed, self.hard)

    def apply_to(self, pid: int) -> None:
        """Set the limit on open files of a process that has just started."""
        with suppress(OSError):  # it has exited already, or belongs to another user by now
            resource.prlimit(pid, resource.RLIMIT_NOFILE, self[:2])
