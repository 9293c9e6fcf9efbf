"""How many files may be open: an agent holds some for each rank, and a rank what it always could.

A shell gives 1024, too few for an agent of hundreds of ranks; but programs that use select() can
do with no more. So a coordinator and its agents take what they may have, and every rank is given
back what was there.
"""

import resource
from contextlib import suppress
from typing import Final, NamedTuple, Self

from muster.contracts.errors import MusterError

OF_A_RANK: Final = 3
"""Its agent holds two logs and a channel."""

OF_AN_AGENT: Final = 24
"""What it needs besides, and no less than a coordinator with a database does."""


class TooFewDescriptors(MusterError):
    """So many ranks cannot be looked after with so few open files."""

    def __init__(self, ranks: int, needed: int, limit: int) -> None:
        super().__init__(
            f"a world size of {ranks} takes {needed} open files, and {limit} are allowed here: ask "
            f"for fewer ranks, or type `ulimit -n {needed}`, in a new shell if this one may not"
        )


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

    def refuse_too_many(self, ranks: int) -> None:
        """Raise `TooFewDescriptors` if an agent of so many ranks would need more than it gets."""
        needed = OF_AN_AGENT + OF_A_RANK * ranks
        if self.hard != resource.RLIM_INFINITY and self.hard < needed:
            raise TooFewDescriptors(ranks, needed, self.hard)

    def impose(self, pid: int) -> None:
        """Give them to a process that has just begun, and to whatever it starts."""
        # It has ended already, or has become another user's, whose limits are not ours to set.
        with suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, self)
