"""The logs of a job as they are written, without gap or repetition across lost connections.

Each event of the stream has an id, from which the server resumes. Events are delivered whole or not
at all.
"""

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

from httpx_sse import EventSource

from muster.client.errors import Busy, Unreachable
from muster.client.http import Connection, pauses, retry_after
from muster.contracts.views import LogLineView

RECONNECT_SECONDS: Final = 60.0
"""Longest time without a connection; an upgrade of the server takes less."""

_NAMED: Final = re.compile(r"\[rank (\d+)\] (.*)", re.DOTALL)


def follow(
    connection: Connection, path: str, rank: int | None, tail: int | None
) -> Iterator[LogLineView]:
    """Yield the lines of one rank or of all until the job is over: the last `tail` first, or all.

    Raises `Unreachable` or `Busy` after a minute without a connection, or if the server asks not to
    be called for longer than that.
    """
    query: dict[str, int] = {} if rank is None else {"rank": rank}
    if tail is not None:
        query["tail"] = tail
    seen: str | None = None
    lost_at: float | None = None
    waits = pauses()
    while True:
        headers = {"Accept": "text/event-stream"}
        if seen is not None:
            headers["Last-Event-ID"] = seen
            query.pop("tail", None)
        wait_seconds = 0.0
        try:
            with connection.stream(path, query, headers) as response:
                lost_at, waits = None, pauses()
                if response.status_code == HTTPStatus.NO_CONTENT:
                    return
                for event in EventSource(response).iter_sse():
                    lost_at, waits = None, pauses()
                    # A ping repeats the last id; the first event only says where to resume.
                    has_lines = event.event == "message" and event.id != seen and not event.retry
                    seen = event.id or seen
                    if event.event == "end":
                        return
                    if has_lines:
                        yield from _log_lines(event.data, rank)
        except (Unreachable, Busy) as error:
            now, wait_seconds = connection.monotonic(), retry_after(error)
            lost_at = now if lost_at is None else lost_at
            if now + wait_seconds > lost_at + RECONNECT_SECONDS:
                raise
        connection.sleep(max(wait_seconds, next(waits)))


def _log_lines(data: str, rank: int | None) -> Iterator[LogLineView]:
    for text in data.split("\n"):
        named = _NAMED.fullmatch(text) if rank is None else None
        number, line = (int(named[1]), named[2]) if named else (rank or 0, text)
        yield LogLineView(rank=number, line=line)
