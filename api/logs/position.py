"""Where a reader is in the logs of a job: for each rank the incarnation and the next byte.

The text ``0.2:4096,1.0:512`` means that of rank 0 everything before incarnation 2 was delivered,
and of that the first 4096 bytes. It needs no memory of ours, so a reader can go on at any server,
and after any restart. The id of an event has before it which job it is of, as an id of a job may be
given again: ``6f1c2ab9/0.2:4096,1.0:512``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muster.contracts.job import JobUid

Place = tuple[int, int]
"""(incarnation, offset of the next byte)"""

Position = Mapping[int, Place]
"""The place in each rank's logs; a rank that is missing begins at its beginning."""

NOWHERE: Final = "0.0:0"
"""The position before everything. Not empty: an empty id tells a browser to send none."""

MARK_LENGTH: Final = 8
"""Of a uid it is enough to tell a job from another one that has had its id."""

PAIRS_LIMIT: Final = 4096

_PAIR: Final = re.compile(r"(\d{1,5})\.(\d{1,9}):(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the id of an event says."""

    mark: str
    """How the uid of the job begins; empty: that is not said."""
    position: Position

    def is_of(self, uid: JobUid) -> bool:
        """Whether it may be of this job, and not of an earlier one."""
        return self.mark in {"", uid[:MARK_LENGTH]}


def format_event_id(uid: JobUid, position: Position) -> str:
    """Return the id of an event behind which a reader of this job is at `position`."""
    return f"{uid[:MARK_LENGTH]}/{format_position(position)}"


def parse_event_id(text: str) -> Seen | None:
    """Return what the id of an event says, or None if it is none; the mark may be missing."""
    mark, _, pairs = text.rpartition("/")
    position = parse_position(pairs)
    return None if position is None else Seen(mark=mark, position=position)


def format_position(position: Position) -> str:
    """Return the text of `position`."""
    pairs = (
        f"{rank}.{incarnation}:{offset}" for rank, (incarnation, offset) in sorted(position.items())
    )
    return ",".join(pairs) or NOWHERE


def parse_position(text: str) -> Position | None:
    """Return the position that `text` names, or None if it names none."""
    position: dict[int, Place] = {}
    for pair in text.split(",", PAIRS_LIMIT):
        found = _PAIR.fullmatch(pair)
        if found is None or int(found[1]) in position:
            return None
        position[int(found[1])] = (int(found[2]), int(found[3]))
    return position
