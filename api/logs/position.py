"""Where a reader is in the logs of a job: for each rank the incarnation and the next byte.

The text is the id of an event: ``0.2:4096,1.0:512`` means that of rank 0 everything before
incarnation 2 was delivered, and of that the first 4096 bytes. It needs no memory of ours, so a
reader can go on at any server, and after any restart.
"""

import re
from collections.abc import Mapping
from typing import Final

Place = tuple[int, int]
"""(incarnation, offset of the next byte)"""

Position = Mapping[int, Place]
"""The place in each rank's logs; a rank that is missing begins at its beginning."""

NOWHERE: Final = "0.0:0"
"""The position before everything. Not empty: an empty id tells a browser to send none."""

PAIRS_LIMIT: Final = 4096

_PAIR: Final = re.compile(r"(\d{1,5})\.(\d{1,9}):(\d{1,18})", re.ASCII)


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
