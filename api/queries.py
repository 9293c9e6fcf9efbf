"""What paths and queries may say: known names, known statuses, possible ids."""

import re
from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from fastapi.routing import APIRoute

from api.problems import FieldError, InvalidRequest, JobNotFound, WorkerNotFound, did_you_mean
from muster.contracts.errors import InvalidSpec
from muster.contracts.job import JobId, JobStatus
from muster.contracts.spec_problems import checked_job_id


async def refuse_unknown_query(request: Request) -> None:
    """Refuse query names that the route does not have: a typing error must not widen a purge."""
    if not request.query_params:
        return  # as of most requests, for which nobody need know what the route has
    route = request.scope.get("route")
    known = _query_names(route) if isinstance(route, APIRoute) else []
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


def _query_names(route: APIRoute) -> list[str]:
    return [
        field.alias
        for field in get_flat_params(route.dependant)
        if isinstance(field.field_info, Query)
    ]


async def _job_id(job_id: Annotated[str, Path(description="The job's id.")]) -> JobId:
    try:
        return checked_job_id(job_id)
    except InvalidSpec:
        # What cannot be an id is the id of no job; it goes no further.
        raise JobNotFound from None


KnownJobId = Annotated[JobId, Depends(_job_id)]


async def _worker_id(
    worker_id: Annotated[str, Path(description="As in the list of workers.")],
) -> int:
    # In ASCII, and within 64 bits.
    if not re.fullmatch(r"[0-9]{1,18}", worker_id):
        raise WorkerNotFound
    return int(worker_id)


KnownWorkerId = Annotated[int, Depends(_worker_id)]


def statuses_of(words: list[str], field: str) -> list[JobStatus]:
    """Return the statuses that `words` (in any case, also joined by commas) name; none: all."""
    if not words:
        return list(JobStatus)
    found = [word.strip() for text in words for word in text.split(",")]
    for word in found:
        if word.upper() not in JobStatus.__members__:
            raise InvalidRequest(
                [
                    FieldError(
                        loc=("query", field),
                        msg=f"use some of {', '.join(JobStatus)}",
                        type="enum",
                        hint=did_you_mean(word.upper(), JobStatus),
                    )
                ]
            )
    return [JobStatus(word.upper()) for word in found]
