"""A command that writes difficult output continuously until DIRECTORY/enough exists.

``python scribbler.py DIRECTORY``. After each write the number of lines goes into a page of shared
memory, which survives the process, so the expected content of the log is known.
"""

import mmap
import os
import random
import sys
import time
from pathlib import Path

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
    """Numbers lines and counts them in a file named after the process."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._name = f"{os.environ['RANK']}.{os.getpid()}.{time.monotonic_ns()}.{kind}"
        witnesses = directory / "witnesses" / os.environ["JOB_ID"]
        witnesses.mkdir(parents=True, exist_ok=True)
        path = witnesses / self._name
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self._count = 0

    def write(self, lines: int, rest: bytes = b"") -> None:
        """Write so many lines at once, each ending with `rest`."""
        numbers = range(self._count, self._count + lines)
        _write_all(b"".join(self._line(number) + rest + b"\n" for number in numbers))
        self._wrote(lines)

    def write_in_halves(self) -> None:
        line = self._line(self._count) + b"\n"
        _write_all(line[: len(line) // 2])
        time.sleep(PAUSES_TO_STAND * PAUSE_SECONDS)
        _write_all(line[len(line) // 2 :])
        self._wrote(1)

    def _line(self, number: int) -> bytes:
        return f"line {number} of {self._name};".encode()

    def _wrote(self, lines: int) -> None:
        self._count += lines
        self._memory[:8] = self._count.to_bytes(8, "little")


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


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
