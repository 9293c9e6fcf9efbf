"""The same lines of a log as JSON, as plain text, or as one JSON object a line."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from fastapi import Response

from api.logs.tail import LogLine, Tail
from api.schemas import LogLineView, LogTail
from muster.contracts.job import JobId

PLAIN: Final = "text/plain"
OBJECTS: Final = "application/x-ndjson"

INCOMPLETE: Final = {"X-Log-Incomplete": "true"}
"""Says that there may be earlier lines with the text that was looked for."""


def as_text(found: Tail, rank: int | None) -> Response:
    """Return the lines; where they are of several ranks each says of which."""
    lines = ((f"[rank {line.name.rank}] " if rank is None else "", line) for line in found.lines)
    text = "".join(f"{prefix}{line.line.text}\n" for prefix, line in lines)
    return Response(text, headers=_headers(found), media_type=f"{PLAIN}; charset=utf-8")


def as_objects(found: Tail) -> Response:
    """Return each line as a JSON object on a line of its own."""
    text = "".join(f"{view.model_dump_json()}\n" for view in _views(found))
    return Response(text, headers=_headers(found), media_type=OBJECTS)


def as_document(job_id: JobId, count: int, found: Tail, response: Response) -> LogTail:
    """Return the lines as the other routes answer."""
    response.headers.update(_headers(found))
    return LogTail(job_id=job_id, tail=count, lines=list(_views(found)))


def _views(found: Tail) -> Iterator[LogLineView]:
    return (_view(line) for line in found.lines)


def _view(line: LogLine) -> LogLineView:
    time = None if line.micros is None else datetime.fromtimestamp(line.micros / 1e6, UTC)
    return LogLineView(rank=line.name.rank, time=time, line=line.line.text)


def _headers(found: Tail) -> dict[str, str]:
    return {} if found.is_complete else INCOMPLETE
