"""Path and query parameters that several routes share."""

import re
from typing import Annotated, Final, Literal

from fastapi import Depends, Path, Query, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query as QueryParameter
from fastapi.routing import APIRoute
from pydantic import AwareDatetime

from api.errors import (
    FieldError,
    InvalidRequest,
    JobNotFound,
    WorkerNotFound,
    did_you_mean,
    invalid_field,
)
from database.jobs import JobQuery
from muster.contracts.errors import InvalidSpec
from muster.contracts.job import JobId, JobStatus
from muster.contracts.spec_problems import checked_job_id

LABELS_LIMIT: Final = 16
"""Most labels in one query."""

_LABEL: Final = re.compile(r"([^\"\\\x00-\x1f:]+):([^\x00]*)", re.DOTALL)


async def refuse_unknown_query(request: Request) -> None:
    """Refuse unknown query parameters: a typing error must not widen a purge."""
    if not request.query_params:
        return
    route = request.scope.get("route")
    parameters = get_flat_params(route.dependant) if isinstance(route, APIRoute) else []
    known = [one.alias for one in parameters if isinstance(one.field_info, QueryParameter)]
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise InvalidRequest(
            [
                FieldError(
                    loc=("query", name),
                    msg="is not a query parameter of this path",
                    type="extra_forbidden",
                    hint=did_you_mean(name, known),
                )
                for name in unknown
            ]
        )


async def _job_id(job_id: Annotated[str, Path(description="The job's id.")]) -> JobId:
    try:
        return checked_job_id(job_id)
    except InvalidSpec:
        raise JobNotFound from None  # no job has an invalid id


KnownJobId = Annotated[JobId, Depends(_job_id)]


async def _worker_id(
    worker_id: Annotated[str, Path(description="As in the list of workers.")],
) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", worker_id):  # ASCII, and within 64 bits
        raise WorkerNotFound
    return int(worker_id)


KnownWorkerId = Annotated[int, Depends(_worker_id)]


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
