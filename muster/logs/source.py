"""What is asked of the logs of a job, and what is answered: positions, lines and filters."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from muster.contracts.job.status import JobUid
from muster.contracts.settings.paths import LogName

LINE_LIMIT_BYTES: Final = 16 * 1024
"""How much of one line is shown; the rest is counted."""

GAP: Final = b"muster: lines are missing here (muster events tells why)"
"""Takes the place of the lines at the beginning of a log that are gone."""

Place = tuple[int, int]
"""(attempt, offset of the next byte)"""

Position = Mapping[int, Place]
"""The place in each rank's logs; a rank that is missing starts at its beginning."""

IsOver = Callable[[LogName], bool]
"""True for logs to which nothing will be added."""

Micros = int
"""Microseconds since 1970 (UTC)."""

_START: Final = "0.0:0"
"""The empty position. An empty id would make a browser send no Last-Event-ID at all."""

_PREFIX_LENGTH: Final = 8
_RANKS_LIMIT: Final = 4096

_PAIR: Final = re.compile(r"(\d{1,5})\.(\d{1,9}):(\d{1,20})", re.ASCII)


def format_event_id(uid: JobUid, position: Position) -> str:
    """Return the id of the event after which a reader of this job is at `position`.

    In ``6f1c2ab9/0.2:4096,1.0:512`` it has everything of rank 0 before attempt 2 and the first 4096
    bytes of that attempt. The prefix identifies the job, because an id can be used again.
    """
    pairs = (f"{rank}.{attempt}:{offset}" for rank, (attempt, offset) in sorted(position.items()))
    return f"{uid[:_PREFIX_LENGTH]}/{','.join(pairs) or _START}"


def parse_event_id(text: str) -> tuple[str, Position] | None:
    """Return the beginning of the job's uid, perhaps empty, and the position; None if invalid."""
    prefix, _, pairs = text.rpartition("/")
    position: dict[int, Place] = {}
    for pair in pairs.split(",", _RANKS_LIMIT):
        found = _PAIR.fullmatch(pair)
        if found is None or int(found[1]) in position:
            return None
        position[int(found[1])] = (int(found[2]), int(found[3]))
    return prefix, position


def shorten(line: bytes) -> bytes:
    """Return what is shown of a line."""
    cut = len(line) - LINE_LIMIT_BYTES
    return line if cut <= 0 else line[:LINE_LIMIT_BYTES] + f" … [{cut} bytes cut]".encode()


def last_states(raw: bytes) -> bytes:
    """Return lines as a terminal leaves them: of the updates of a progress bar the last one.

    After a carriage return a line begins again, unless it ends there.
    """
    if b"\r" not in raw:
        return raw
    return b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in raw.split(b"\n"))


def decode(raw: bytes) -> str:
    """Return lines, joined by line ends, as text: of each its last state."""
    return last_states(raw).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Lines:
    """Adjacent lines of one log that were written at the same time, or a piece of a line.

    They stay together, because handling a line by itself costs more than its content.
    """

    name: LogName
    start: int
    end: int
    """The bytes [start, end) of the log, the last line end included."""
    raw: bytes
    """Without the last line end."""
    micros: Micros | None
    """When they had been written; None: not known yet."""

    @property
    def text(self) -> str:
        """What is shown: of each line the last state, with a note where bytes were cut off."""
        raw = last_states(self.raw)
        lines = raw.split(b"\n")
        is_cut = max(map(len, lines)) > LINE_LIMIT_BYTES
        return decode(b"\n".join(map(shorten, lines)) if is_cut else raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which lines of a job's logs are wanted; by default all."""

    rank: int | None = None
    attempt: int | None = None
    since: Micros | None = None
    until: Micros | None = None
    """Lines whose time is not known yet are later than this."""
    text: str | None = None
    after: Position = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tail:
    """The last lines that match a filter."""

    lines: Sequence[Lines]
    """Each is one line."""
    is_complete: bool
    """False if the search stopped at its limit, so earlier lines may match as well."""
