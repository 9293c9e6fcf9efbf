"""What ranks print, on standard output: nothing is lost for want of room.

A terminal or a pipe may be full, and whoever shares it may have made it one that does not wait. So
this waits for it. When nobody reads any more the job goes on without an audience, and that is said
once: `muster run … | head` has seen what it wanted, and hours of training are worth more.
"""

import os
import select
from collections.abc import Callable
from typing import TextIO


class Outlet:
    """Writes to `output` past its buffer, which must hold nothing; None is an output that is not.

    `remark` gets the sentence that there is nobody to write to any more.
    """

    def __init__(self, output: TextIO | None, remark: Callable[[str], None]) -> None:
        self._output = output
        self._remark = remark

    def say(self, lines: str) -> None:
        """Write one or several lines, and wait as long as that takes. Never raises."""
        if self._output is None:
            return
        try:
            encoded = f"{lines}\n".encode(self._output.encoding, "backslashreplace")
            _write_all(self._output.fileno(), encoded)
        except (OSError, ValueError) as error:  # the second: somebody has closed it
            self._output = None
            self._remark(f"what ranks print is in their logs alone from now on ({error})")


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest[: _whole_lines(rest)]) :]
        except BlockingIOError:
            _wait_for_room(descriptor)


def _whole_lines(content: memoryview) -> int:
    """Return how much a pipe takes at once, so that no remark comes into the midst of a line."""
    piece = bytes(content[: select.PIPE_BUF])
    return piece.rfind(b"\n") + 1 or len(piece)


def _wait_for_room(descriptor: int) -> None:
    """Return when something can be written, or nothing will ever be."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    waiting.poll()
