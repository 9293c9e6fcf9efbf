"""Pages of a list: an opaque cursor in, a Link header out. Keyset, so that no page skips a job."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias, TypeVar
from urllib.parse import urlencode

import msgspec
from fastapi import Depends, Query, Request
from msgspec import Meta
from msgspec.json import Decoder

from api.problems import InvalidRequest, invalid_field
from api.selecting import AskedSelection
from muster.contracts.job import JobId
from muster.contracts.spec import JOB_ID_PATTERN
from store.records import Job
from store.selection import Selection

DEFAULT_LIMIT = 1000
"""High, so that small clients never page."""

Place: TypeAlias = tuple[datetime, JobId]
"""Where a page of jobs ends: the last one's time of creation and id."""

PLACES: Final[Decoder[Place]] = Decoder(
    tuple[datetime, Annotated[JobId, Meta(pattern=f"^{JOB_ID_PATTERN}$")]]
)

_PLACED: Final = frozenset({"limit", "cursor"})

AnyPlace = TypeVar("AnyPlace", bound=tuple[Any, ...])


def encode_cursor(place: tuple[Any, ...]) -> str:
    """Return `place`, which begins with a time, as an opaque word."""
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def decode_cursor(text: str | None, places: Decoder[AnyPlace]) -> AnyPlace | None:
    """Return where the page before ended; raise `InvalidRequest` for what is no cursor."""
    if text is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        place = places.decode(raw)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise _no_cursor() from None
    if place[0].tzinfo is None:
        raise _no_cursor()
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a list was asked for."""

    selection: Selection
    limit: int
    after: Place | None


async def _asked_page(
    selection: AskedSelection,
    limit: Annotated[
        int, Query(ge=1, le=DEFAULT_LIMIT, description="Most jobs of one answer.")
    ] = DEFAULT_LIMIT,
    cursor: Annotated[
        str | None, Query(description="From the Link header of the page before.")
    ] = None,
) -> Page:
    return Page(selection=selection, limit=limit, after=decode_cursor(cursor, PLACES))


AskedPage = Annotated[Page, Depends(_asked_page)]


def link_next(request: Request, page: Page, last: Job) -> str:
    """Return the Link header that leads to the page after `last`, with the same filters."""
    asked = request.query_params.multi_items()
    filters = [(name, value) for name, value in asked if name not in _PLACED]
    return next_page(request, filters, page.limit, (last.created_at, last.job_id))


def next_page(
    request: Request, query: Sequence[tuple[str, str]], limit: int, place: tuple[Any, ...]
) -> str:
    """Return the Link header that leads to what comes after `place`."""
    asked = [*query, ("limit", str(limit)), ("cursor", encode_cursor(place))]
    return f'<{request.scope["path"]}?{urlencode(asked)}>; rel="next"'


def _no_cursor() -> InvalidRequest:
    return invalid_field(
        "query", "cursor", "is no cursor of ours: follow the Link header, or leave it out"
    )
