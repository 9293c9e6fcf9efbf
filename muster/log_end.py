"""The end of a rank's log, for whoever has to say why it ended."""

import os
from typing import Final

LAST_LINES: Final = 10
LAST_BYTES: Final = 8192
"""What a failure message quotes: enough for the end of a traceback, and never a whole log."""


def last_lines(log: int) -> tuple[str, ...]:
    """Return the end of the log that this descriptor reads, bounded in lines and bytes."""
    size = os.fstat(log).st_size
    tail = os.pread(log, LAST_BYTES, max(0, size - LAST_BYTES))
    return tuple(tail.decode(errors="replace").splitlines()[-LAST_LINES:])
