"""Times as people type and read them: ``90d``, ``12h``, ``30m``, and moments to the second."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

_SECONDS: Final[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> int | None:
    """Return how long ``90d`` is; None for what is no such time."""
    found = re.fullmatch(r"([0-9]{1,10})([smhd])", text)
    return int(found[1]) * _SECONDS[found[2]] if found else None


def moment_of(text: str, now: datetime) -> datetime | None:
    """Return when ``10m`` ago was, or a moment that is written out; None for neither.

    A moment without an offset is this machine's.
    """
    seconds = seconds_of(text)
    try:
        if seconds is not None:
            return now - timedelta(seconds=seconds)
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def shown(moment: datetime | str) -> str:
    """Return a moment of UTC as people read it; a text is one as the API writes it."""
    text = moment if isinstance(moment, str) else moment.isoformat()
    return text[:19].replace("T", " ")
