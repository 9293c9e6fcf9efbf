"""How far a reader is in the logs of a job: for each rank the attempt and the next byte.

In ``6f1c2ab9/0.2:4096,1.0:512`` the reader has everything of rank 0 before attempt 2 and the first
4096 bytes of that attempt. The prefix identifies the job, because an id can be used again. The
position is the id of a server-sent event, so a reader can resume at any server after any restart.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muster.contracts.job import JobUid

Place = tuple[int, int]
"""(attempt, offset of the next byte)"""

Position = Mapping[int, Place]
"""The place in each rank's logs; a rank that is missing starts at its beginning."""

_START: Final = "0.0:0"
"""The empty position. An empty id would make a browser send no Last-Event-ID at all."""

_PREFIX_LENGTH: Final = 8
_RANKS_LIMIT: Final = 4096

_PAIR: Final = re.compile(r"(\d{1,5})\.(\d{1,9}):(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class EventId:
    """A parsed event id."""

    job_prefix: str
    """The beginning of the job's uid; empty if the id has none."""
    position: Position

    def is_of(self, uid: JobUid) -> bool:
        return self.job_prefix in {"", uid[:_PREFIX_LENGTH]}


def format_event_id(uid: JobUid, position: Position) -> str:
    """Return the id of the event after which a reader of this job is at `position`."""
    pairs = (f"{rank}.{attempt}:{offset}" for rank, (attempt, offset) in sorted(position.items()))
    return f"{uid[:_PREFIX_LENGTH]}/{','.join(pairs) or _START}"


def parse_event_id(text: str) -> EventId | None:
    """Return the parsed id, or None if it is invalid; the prefix may be missing."""
    prefix, _, pairs = text.rpartition("/")
    position: dict[int, Place] = {}
    for pair in pairs.split(",", _RANKS_LIMIT):
        found = _PAIR.fullmatch(pair)
        if found is None or int(found[1]) in position:
            return None
        position[int(found[1])] = (int(found[2]), int(found[3]))
    return EventId(prefix, position)
