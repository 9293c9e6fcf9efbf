"""What the ranks of a job print, on one terminal: line by line, each with the rank that said it.

Ranks write into files of their own, and this follows them. So nobody waits for a slow terminal, and
what is shown is what the logs hold.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from muster.contracts.layout import LogName
from muster.letters import whole_letters

CHUNK_BYTES: Final = 1 << 18
"""Read at once. A line that is longer is shown in pieces."""

ROUNDS: Final = 16
"""Whoever prints without end does not keep the others, and the caller, waiting."""


class Relay:
    """Follows the logs in one directory, those to come included."""

    def __init__(self, logs: Path, say: Callable[[str], None]) -> None:
        """`say` gets one or several lines. What is in the logs already is not said again."""
        self._logs = logs
        self._say = say
        self._positions = {name: path.stat().st_size for name, path in self._present()}

    def pass_on(self) -> None:
        """Say the lines that have ended by now; of very many the rest is for the next call."""
        for _ in range(ROUNDS):
            if not self._round(_ended_bytes):
                return

    def finish(self) -> None:
        """Say everything, the last lines too that nobody has ended; nobody may write any more."""
        while self._round(_ended_bytes):
            pass
        self._round(len)

    def _round(self, count: Callable[[bytes], int]) -> bool:
        """Say something of each log that has news; return whether there was any."""
        told = [self._tell(name, path, count) for name, path in self._present()]
        return any(told)

    def _present(self) -> Iterator[tuple[LogName, Path]]:
        try:
            paths = list(self._logs.glob("*.log"))
        except OSError:  # too many files are open: they are looked for again
            return
        names = ((LogName.parse(path.name), path) for path in paths)
        yield from sorted((name, path) for name, path in names if name is not None)

    def _tell(self, name: LogName, path: Path, count: Callable[[bytes], int]) -> bool:
        """Say as much of what is new as `count` takes; it is not said again."""
        content = _read(path, self._positions.setdefault(name, 0))
        taken = content[: count(content)]
        self._positions[name] += len(taken)
        if taken:
            lines = taken.decode(errors="replace").removesuffix("\n").split("\n")
            self._say("\n".join(f"[{name.rank}] {line}" for line in lines))
        return bool(taken)


def _read(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as log:
            log.seek(position)
            return log.read(CHUNK_BYTES)
    except OSError:  # whoever removes a log does not want it shown
        return b""


def _ended_bytes(content: bytes) -> int:
    """Return how long the lines are that have ended; of a chunk without any, the whole letters."""
    ended = content.rfind(b"\n") + 1
    return whole_letters(content) if not ended and len(content) == CHUNK_BYTES else ended
