"""The numbered lines that one reader of a job's log stream received.

At the end it must have every line that any rank wrote, once, and the lines of each process in the
order in which they were written.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from stress.chaos.program import witness_directory

NUMBERED = re.compile(r"\[rank (\d+)\] line (\d+) of (\S+)")


class NumberedLines:
    """The line numbers of one job by writer."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._numbers: dict[str, list[int]] = defaultdict(list)
        """Writer → its line numbers in order of arrival."""

    def take(self, lines: Sequence[str]) -> None:
        for line in lines:
            if found := NUMBERED.fullmatch(line):
                self._numbers[found[3]].append(int(found[2]))

    def faults(self, checkpoint_dir: Path) -> Iterator[str]:
        """Yield one sentence per gap, duplicate or reordering."""
        for who, numbers in self._numbers.items():
            if numbers != list(range(len(numbers))):
                yield f"lines of {who} are not in order, once each: {_around(numbers)}"
        for witness in witness_directory(checkpoint_dir).glob(f"{self._job_id}.*"):
            written = int.from_bytes(witness.read_bytes(), "little")
            found = len(self._numbers[witness.name])
            # The process may have been killed between the line and its counter.
            if found not in {written, written + 1}:
                yield f"{witness.name} wrote {written} lines, and {found} are in the log"


def _around(numbers: list[int]) -> str:
    wrong = next(place for place, number in enumerate(numbers) if place != number)
    return f"… {numbers[max(0, wrong - 3) : wrong + 4]} … at place {wrong}"
