"""One reader of a job's stream of logs, who comes back whenever the stream breaks off.

It resumes by the id of the last event it has seen. At the end it must have every line that any
rank ever wrote, once, each process's in the order in which it wrote them.
"""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
from chaos_program import witness_directory

NUMBERED = re.compile(r"\[rank (\d+)\] line (\d+) of (\S+)")
RETRY_SECONDS = 0.3
PATIENCE_SECONDS = 20.0
"""A stream says something every 15 seconds, if only that it is there."""


class LogFollower:
    """Follows the logs of one job until the stream says that it has ended."""

    def __init__(self, url: str, job_id: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False)
        self._path = f"/jobs/{job_id}/logs/stream"
        self._job_id = job_id
        self._position: str | None = None
        self.has_ended = False
        self._is_given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._lines: dict[str, list[int]] = defaultdict(list)
        """Who printed → the numbers of its lines, in the order in which they came."""
        self.resumed = 0

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_seconds: float) -> None:
        """Wait for the end of the stream, and give it up if it does not come."""
        self._thread.join(timeout_seconds)
        self._is_given_up.set()

    def faults(self, checkpoint_dir: Path) -> Iterator[str]:
        """Yield what is wrong with what was read, a sentence each."""
        for who, numbers in self._lines.items():
            if numbers != list(range(len(numbers))):
                yield f"lines of {who} are not in order, once each: {_around(numbers)}"
        for witness in witness_directory(checkpoint_dir).glob(f"{self._job_id}.*"):
            written = int.from_bytes(witness.read_bytes(), "little")
            found = len(self._lines[witness.name])
            # It may have been killed between the line and its witness.
            if found not in {written, written + 1}:
                yield f"{witness.name} wrote {written} lines, and {found} are in the log"

    def _run(self) -> None:
        with self._client:
            while not (self.has_ended or self._is_given_up.is_set()):
                try:
                    self._follow()
                except httpx.TransportError:
                    time.sleep(RETRY_SECONDS)

    def _follow(self) -> None:
        headers = {} if self._position is None else {"Last-Event-ID": self._position}
        with self._client.stream("GET", self._path, headers=headers) as answer:
            if answer.status_code == httpx.codes.NO_CONTENT:
                self.has_ended = True
                return
            self.resumed += self._position is not None
            self.take_events(answer.iter_lines())

    def take_events(self, lines: Iterator[str]) -> None:
        """An event counts once it is whole: then its id says where to go on."""
        data: list[str] = []
        name, position = "", self._position
        for line in lines:
            field, _, value = line.partition(": ")
            if field == "data":
                data.append(value)
            elif field == "event":
                name = value
            elif field == "id":
                position = value
            elif not line:
                self.has_ended = self.has_ended or name == "end"
                self._position = position
                self._note(() if name else data)
                data, name = [], ""

    def _note(self, data: list[str] | tuple[()]) -> None:
        for line in data:
            if found := NUMBERED.fullmatch(line):
                self._lines[found[3]].append(int(found[2]))


def _around(numbers: list[int]) -> str:
    wrong = next(place for place, number in enumerate(numbers) if place != number)
    return f"… {numbers[max(0, wrong - 3) : wrong + 4]} … at place {wrong}"
