"""When a disk is nearly full."""

from typing import Final

LOW_BYTES: Final = 1 << 30
LOW_SHARE: Final = 0.05
"""Below both a disk is nearly full: a gigabyte is much on a small one and little on a large one."""


def is_nearly_full(free_bytes: int, total_bytes: int) -> bool:
    """Return whether there is too little room to go on for long."""
    return free_bytes < min(LOW_BYTES, LOW_SHARE * total_bytes)
