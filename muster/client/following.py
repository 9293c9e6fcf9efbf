"""The logs of a job as they are written, without gap or repetition, however often it breaks off.

The server says with each event where to go on after it; an event is delivered whole or not at all.
"""

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

from muster.client.connection import Connection, Query, pauses
from muster.client.errors import Busy, Unreachable
from muster.client.outcomes import retry_after
from muster.client.stream import ServerEvent, events_of
from muster.client.views import LogLineView

PATIENCE_SECONDS: Final = 60.0
"""How long one goes on trying to come back to a stream: an upgrade of the server is shorter."""

_NAMED: Final = re.compile(r"\[rank (\d+)\] (.*)", re.DOTALL)


def follow(
    connection: Connection, path: str, rank: int | None, tail: int | None
) -> Iterator[LogLineView]:
    """Yield the job's lines until it is over: of one rank or all, the last `tail` first or all.

    Raises `Unreachable` or `Busy` once nobody has served it for a minute, or wants to be left
    alone for longer than that.
    """
    query: dict[str, int] = {} if rank is None else {"rank": rank}
    seen: str | None = None
    lost_at: float | None = None
    waits = pauses()
    while True:
        asked = query if tail is None or seen is not None else {**query, "tail": tail}
        wait_seconds = 0.0
        try:
            for event in _events(connection, path, asked, seen):
                lost_at, waits, seen = None, pauses(), event.id or seen
                if event.name == "end":
                    return
                if not event.name and event.data is not None:
                    yield from _log_lines(event.data, rank)
        except (Unreachable, Busy) as error:
            now, wait_seconds = connection.monotonic(), retry_after(error)
            lost_at = now if lost_at is None else lost_at
            if now + wait_seconds > lost_at + PATIENCE_SECONDS:
                raise
        connection.sleep(max(wait_seconds, next(waits)))


def _events(
    connection: Connection, path: str, query: Query, seen: str | None
) -> Iterator[ServerEvent]:
    headers = {"Accept": "text/event-stream"}
    if seen is not None:
        headers["Last-Event-ID"] = seen
    with connection.stream(path, query, headers) as response:
        # Somebody is there, though he may have nothing to say for a long time.
        is_over = response.status_code == HTTPStatus.NO_CONTENT
        yield ServerEvent("end" if is_over else "open", "", seen)
        yield from events_of(response.iter_bytes())


def _log_lines(data: str, rank: int | None) -> Iterator[LogLineView]:
    for text in data.split("\n"):
        named = None if rank is not None else _NAMED.fullmatch(text)
        if named is not None:
            yield LogLineView(rank=int(named[1]), line=named[2])
        else:
            yield LogLineView(rank=rank or 0, line=text)
