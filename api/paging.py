"""Pages of a list: an opaque cursor in, a Link header out. Keyset, so that no page skips a job."""

import base64
import binascii
from collections.abc import Sequence
from datetime import datetime
from urllib.parse import urlencode

import msgspec

from api.problems import InvalidRequest, invalid_field
from muster.contracts.job import JobId
from store.records import Job

DEFAULT_LIMIT = 1000
"""High, so that small clients never page."""

Place = tuple[datetime, JobId]
"""Where a page ends: the last job's time of creation and id."""


def encode_cursor(place: Place) -> str:
    """Return `place` as an opaque word."""
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def decode_cursor(text: str | None) -> Place | None:
    """Return where the page before ended; raise `InvalidRequest` for what is no cursor."""
    if text is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        moment, job_id = msgspec.json.decode(raw, type=tuple[datetime, str])
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise _no_cursor() from None
    if moment.tzinfo is None:
        raise _no_cursor()
    return moment, JobId(job_id)


def link_next(path: str, statuses: Sequence[str], limit: int, last: Job) -> str:
    """Return the Link header that leads to the page after `last`."""
    query = [("status", status) for status in statuses]
    query += [("limit", str(limit)), ("cursor", encode_cursor((last.created_at, last.job_id)))]
    return f'<{path}?{urlencode(query)}>; rel="next"'


def _no_cursor() -> InvalidRequest:
    return invalid_field(
        "query", "cursor", "is no cursor of ours: follow the Link header, or leave it out"
    )
