"""Numbered lines whose count survives the process that prints them.

After each write the number of lines goes into a page of shared memory in a file named after the
process. So the number of lines that a killed process has written is known, and its log must hold
all of them.
"""

import mmap
import os
import time
from pathlib import Path


class Witness:
    """Counts the lines of one process, in a new file of `directory`."""

    def __init__(self, directory: Path, prefix: str, suffix: str = "") -> None:
        self._name = f"{prefix}.{os.getpid()}.{time.monotonic_ns()}{suffix}"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / self._name
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self._count = 0

    def next_lines(self, count: int) -> list[bytes]:
        """Return the beginnings of the next lines; `wrote` follows when they are written."""
        numbers = range(self._count, self._count + count)
        return [f"line {number} of {self._name}".encode() for number in numbers]

    def wrote(self, lines: int) -> None:
        self._count += lines
        self._memory[:8] = self._count.to_bytes(8, "little")


def write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
