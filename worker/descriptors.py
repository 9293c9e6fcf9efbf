"""How many files may be open: an agent holds some for each rank, and a rank what it always could.

A shell gives 1024, too few for an agent of hundreds of ranks; but programs that use select() can
do with no more. So an agent takes what it may have, and every rank is given back what was there.
"""

import os
import resource
from contextlib import ExitStack, suppress
from typing import Final, NamedTuple, Self

FOR_A_LOOK: Final = 4
"""At most so many are open at once while /proc is searched, and what is found there is ended."""


def require(count: int = FOR_A_LOOK) -> None:
    """Raise OSError unless so many more files can be opened.

    To whoever has too few for a look into /proc, everybody there would seem to be gone.
    """
    with ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open("/", os.O_PATH | os.O_CLOEXEC))


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
