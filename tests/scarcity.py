"""A process that has no descriptor to spare, by its real limit, and gets them back."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptors(pid: int = 0, *, but: int = 0) -> Iterator[None]:
    """Let a process (0: this one) open nothing while inside, `but` for so many files.

    A new descriptor has the lowest number that is free, and none is free below the limit.
    """
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid or 'self'}/fd")}  # noqa: PTH208  names
    if not pid:
        taken -= {number for number in taken if not _is_open(number)}  # that of the look itself
    free = (number for number in range(before[0]) if number not in taken)
    limit = [next(free) for _ in range(but + 1)][-1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
