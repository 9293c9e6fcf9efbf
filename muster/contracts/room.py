"""When a disk is nearly full, of bytes or of files: many file systems can number only so many."""

from typing import Final

LOW_BYTES: Final = 1 << 30
LOW_SHARE: Final = 0.05
"""Below both a disk is nearly full: a gigabyte is much on a small one and little on a large one."""

LOW_FILES: Final = 10_000
"""The same of files: a job of few ranks makes some dozens."""


def is_nearly_full(free_bytes: int, total_bytes: int) -> bool:
    """Return whether there is too little room to go on for long."""
    return free_bytes < min(LOW_BYTES, LOW_SHARE * total_bytes)


def has_few_files_left(free_files: int, total_files: int) -> bool:
    """Return the same of how many more files there can be; False where nobody counts them."""
    return free_files < min(LOW_FILES, LOW_SHARE * total_files)
