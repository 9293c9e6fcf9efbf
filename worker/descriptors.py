"""How many files may be open: an agent holds some for each rank, and a rank what it always could.

A shell gives 1024, too few for an agent of hundreds of ranks; but programs that use select() can
do with no more. So an agent takes what it may have, and every rank is given back what was there.
"""

import resource
from contextlib import suppress
from typing import NamedTuple, Self


class DescriptorLimits(NamedTuple):
    """The soft and the hard limit of a process."""

    soft: int
    hard: int

    @classmethod
    def raised(cls) -> Self:
        """Raise this process's limit as far as it goes; return what it was."""
        before = cls(*resource.getrlimit(resource.RLIMIT_NOFILE))
        with suppress(OSError, ValueError):  # it does without, as far as that goes
            resource.setrlimit(resource.RLIMIT_NOFILE, (before.hard, before.hard))
        return before

    def impose(self, pid: int) -> None:
        """Give them to a process that has just begun, and to whatever it starts."""
        # It has ended already, or has become another user's, whose limits are not ours to set.
        with suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, self)
