"""Whether a rank is at work itself. Whenever it is not, it waits for the others.

A rank that hangs in its program makes all others wait, and it alone is to blame. What is marked is
the work and not the waiting: there are few places where a rank works, and a wait that nobody has
thought of must not end a process.
"""

from types import TracebackType


class Work:
    """Marks the work of one thread, for another one that tells of it: ``with work: …``."""

    def __init__(self) -> None:
        self.is_under_way = False

    def __enter__(self) -> None:
        self.is_under_way = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.is_under_way = False
