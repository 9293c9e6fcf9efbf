"""The end of a rank's log, for whoever has to say why it ended."""

import os
from typing import Final

LAST_LINES: Final = 10
LAST_BYTES: Final = 8192
"""What a failure message quotes: enough for the end of a traceback, and never a whole log."""

TOO_LONG: Final = f"[the last line is longer than {LAST_BYTES} bytes: read it in the log]"


def last_lines(log: int) -> tuple[str, ...]:
    """Return the end of the log that this descriptor reads, bounded in lines and bytes.

    Whole lines only: in half of one nobody would recognize a secret, to take it out.
    """
    size = os.fstat(log).st_size
    begin = max(0, size - LAST_BYTES)
    lines = os.pread(log, LAST_BYTES, begin).decode(errors="replace").splitlines()
    if begin:
        lines = lines[1:] or [TOO_LONG]
    return tuple(lines[-LAST_LINES:])
