"""Memory that one step frees is kept for the next, which wants just as much of it.

The C library gives large blocks back to the system as soon as they are free, and every page of
them is faulted in and cleared again a moment later. In a step that computes little, that was more
than half of all processor time.
"""

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Names of the GNU C library, from its malloc.h."""

KEPT_BYTES: Final = (1 << 31) - 1
"""So much free memory stays with the process: the most that can be said."""

POOLED_BYTES: Final = 32 << 20
"""Blocks up to this size are kept, the most that the library allows. For larger ones numpy asks the
system for huge pages, of which there are few to fault in."""


def keep_freed_memory() -> None:
    """Set up this process, once and for all; without effect where there is another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, POOLED_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
