"""Lists: which jobs, pages with keyset cursors, and conditional requests with entity tags.

A job's own tag is strong: it is the version of its row, so a change can be made conditional on it.
Other tags are weak: they are equal if the data behind the response is equal.
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar
from urllib.parse import urlencode

import msgspec
import xxhash
from fastapi import Depends, Header, Query, Request, Response
from msgspec import Meta
from msgspec.json import Decoder
from pydantic import AwareDatetime

from api.dependencies import AppState
from api.errors import invalid_field
from api.schema import reply
from api.views import job_tag
from database.errors import JobChanged
from database.jobs import JobQuery
from database.records import Job, RowVersion
from muster.contracts.job.field_types import JOB_ID_PATTERN
from muster.contracts.job.problems import did_you_mean
from muster.contracts.job.status import JobId, JobStatus
from muster.contracts.views.view import Moment, View

DEFAULT_LIMIT: Final = 1000
"""High, so that small clients never page."""

Place: TypeAlias = tuple[datetime, JobId]
"""The end of a page of jobs: creation time and id of the last one."""

PLACES: Final[Decoder[Place]] = Decoder(
    tuple[Moment, Annotated[JobId, Meta(pattern=f"^{JOB_ID_PATTERN}$")]]
)

AnyPlace = TypeVar("AnyPlace", bound=tuple[Any, ...])
Item = TypeVar("Item")

PageLimit = Annotated[int, Query(ge=1, le=DEFAULT_LIMIT, description="Most items of one response.")]
Cursor = Annotated[str | None, Query(description="From the Link header of the previous page.")]
IfNoneMatch = Annotated[
    str | None,
    Header(description="The ETag of an earlier response: 304 without a body if it is current."),
]
IfMatch = Annotated[
    str | None,
    Header(description="The ETag of the job as you know it: 412 if it has changed since."),
]

LABELS_LIMIT: Final = 16
"""Most labels in one query."""

_LABEL: Final = re.compile(r"([^\"\\\x00-\x1f:]+):([^\x00]*)", re.DOTALL)


def statuses_of(words: list[str], field: str) -> list[JobStatus]:
    """Return the statuses named by `words`, in any case, also joined by commas; all if empty."""
    if not words:
        return list(JobStatus)
    found = [word.strip().upper() for text in words for word in text.split(",")]
    for word in found:
        if word not in JobStatus.__members__:
            raise invalid_field(
                "query",
                field,
                f"expected one of {', '.join(JobStatus)}",
                did_you_mean(word, JobStatus),
            )
    return [JobStatus(word) for word in found]


async def _selection(
    status: Annotated[
        list[str], Query(description="Only jobs with one of these statuses; may be repeated.")
    ] = [],  # noqa: B006  FastAPI copies it
    name: Annotated[str | None, Query(description="Only jobs of exactly this name.")] = None,
    label: Annotated[
        list[str],
        Query(description="Only jobs with this label, as `team:vision`; may be repeated."),
    ] = [],  # noqa: B006
    created_after: Annotated[
        AwareDatetime | None, Query(description="Only jobs created later than this.")
    ] = None,
    created_before: Annotated[
        AwareDatetime | None, Query(description="Only jobs created earlier than this.")
    ] = None,
    sort: Annotated[
        Literal["-created_at", "created_at"], Query(description="With the `-` the newest first.")
    ] = "-created_at",
) -> JobQuery:
    if name is not None and "\0" in name:
        raise invalid_field("query", "name", "holds a NUL character")
    return JobQuery(
        statuses=statuses_of(status, "status"),
        name=name,
        labels=_labels(label),
        created_after=created_after,
        created_before=created_before,
        oldest_first=sort == "created_at",
    )


SelectedJobs = Annotated[JobQuery, Depends(_selection)]


def _labels(words: list[str]) -> dict[str, str]:
    if len(words) > LABELS_LIMIT:
        raise invalid_field("query", "label", f"at most {LABELS_LIMIT} labels may be given")
    found = [_LABEL.fullmatch(word) for word in words]
    labels = {label[1]: label[2] for label in found if label is not None}
    if len(labels) < len(words):
        raise invalid_field(
            "query",
            "label",
            "use name:value, each name once, without quotes and backslashes in it",
        )
    return labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A requested page of jobs."""

    selection: SelectedJobs
    limit: PageLimit = DEFAULT_LIMIT
    cursor: Cursor = None


RequestedPage = Annotated[Page, Depends()]


def jobs_of(page: Page, state: AppState, request: Request) -> tuple[Sequence[Job], dict[str, str]]:
    """Return the jobs of a page, and the headers with their number and the next page."""
    after = decode_cursor(page.cursor, PLACES)
    found = state.jobs.page(page.selection, page.limit + 1, after)
    total = state.jobs.count(page.selection)
    return one_page(request, found, page.limit, total, lambda job: (job.created_at, job.job_id))


def one_page(
    request: Request,
    found: Sequence[Item],
    limit: int,
    total: int,
    place_of: Callable[[Item], tuple[Any, ...]],
) -> tuple[Sequence[Item], dict[str, str]]:
    """Return the first `limit` items, and the headers with their total and the next page.

    There is a next page if one item more than `limit` was found.
    """
    headers = {"X-Total-Count": str(total)}
    if len(found) > limit:
        asked = request.query_params.multi_items()
        filters = [(name, value) for name, value in asked if name not in {"limit", "cursor"}]
        cursor = encode_cursor(place_of(found[limit - 1]))
        query = urlencode([*filters, ("limit", str(limit)), ("cursor", cursor)])
        headers["Link"] = f'<{request.scope["path"]}?{query}>; rel="next"'
    return found[:limit], headers


def encode_cursor(place: tuple[Any, ...]) -> str:
    """Return `place`, which begins with a time, as an opaque word."""
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def decode_cursor(text: str | None, places: Decoder[AnyPlace]) -> AnyPlace | None:
    """Return the end of the previous page; raise `InvalidRequest` for an invalid cursor."""
    if text is None:
        return None
    try:
        return places.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, msgspec.MsgspecError):
        message = "is not a valid cursor: follow the Link header, or leave it out"
        raise invalid_field("query", "cursor", message) from None


def weak_tag(request: Request, *parts: Any) -> str:  # noqa: ANN401  all that msgspec can encode
    """Return the tag of the response to `request` that is made from `parts`."""
    asked = request.scope["path"], request.query_params.multi_items()
    data = msgspec.json.encode([asked, *parts])
    return f'W/"{xxhash.xxh3_128_hexdigest(data)}"'


def reply_tagged(
    tag: str,
    known: str | None,
    view: Callable[[], View],
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return `view` under its tag, or 304 if the client knows that tag."""
    headers = {**(headers or {}), "ETag": tag}
    # A tag with its quotes cannot be a part of another one.
    if known is not None and (known.strip() == "*" or tag.removeprefix("W/") in known):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return reply(view(), headers=headers)


def required_version(job: Job, wanted: str | None) -> RowVersion | None:
    """Return the row version that a change requires; None if it requires none.

    Raises `JobChanged` if `job` does not match the header If-Match.
    """
    if wanted is None or wanted.strip() == "*":
        return None
    if job_tag(job) not in wanted or f"W/{job_tag(job)}" in wanted:
        raise JobChanged(job.job_id)
    return job.row_version
