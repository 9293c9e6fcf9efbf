"""A command that writes difficult output continuously until DIRECTORY/enough exists.

``python scribbler.py DIRECTORY``. It counts its lines, so the expected content of the log is known.
"""

import os
import random
import sys
import time
from pathlib import Path

from stress.witness import Witness, write_all

FAST_LINES = 60
SLOW_LINES = 3
"""Lines per write; a hundred writes per second."""

LONG_BYTES = 1 << 17
"""Longer than the part of a line that is shown, but short enough to stay one line."""

PAUSE_SECONDS = 0.01
CHILD_PAUSE_SECONDS = 0.05
PAUSES_TO_STAND = 5
"""Time between two halves of a line."""


class Writer:
    """Writes numbered lines in several ways."""

    def __init__(self, directory: Path, kind: str) -> None:
        place = directory / "witnesses" / os.environ["JOB_ID"]
        self._witness = Witness(place, os.environ["RANK"], f".{kind}")

    def write(self, lines: int, rest: bytes = b"") -> None:
        """Write so many lines at once, each ending with `rest`."""
        write_all(b"".join(line + b";" + rest + b"\n" for line in self._witness.next_lines(lines)))
        self._witness.wrote(lines)

    def write_in_halves(self) -> None:
        line = self._witness.next_lines(1)[0] + b";\n"
        write_all(line[: len(line) // 2])
        time.sleep(PAUSES_TO_STAND * PAUSE_SECONDS)
        write_all(line[len(line) // 2 :])
        self._witness.wrote(1)


def main() -> None:
    directory = Path(sys.argv[1])
    is_fast = os.environ["RANK"] == "0"
    if not is_fast:
        _leave_a_child(directory)
    chance = random.Random()  # noqa: S311  every attempt behaves differently
    writer = Writer(directory, "rank")
    while not (directory / "enough").exists():
        writer.write(FAST_LINES if is_fast else SLOW_LINES)
        lot = chance.random()
        if lot < 0.002:
            writer.write(1, b"x" * LONG_BYTES)
        elif lot < 0.05:
            writer.write(1, chance.randbytes(99).replace(b"\n", b"\r"))
        elif lot < 0.07 and is_fast:  # no other process writes to this line
            writer.write_in_halves()
        time.sleep(PAUSE_SECONDS)
    if is_fast:
        os.write(1, b"the last line has no end")


def _leave_a_child(directory: Path) -> None:
    """Start a process that writes on after its parent has ended."""
    if os.fork() == 0:
        os.setsid()
        writer = Writer(directory, "child")
        while not (directory / "enough").exists():
            writer.write(1)
            time.sleep(CHILD_PAUSE_SECONDS)
        os._exit(0)


if __name__ == "__main__":
    main()
