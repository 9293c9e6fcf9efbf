"""What a route may use, in one value that the wiring hands to the application."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, cast

from anyio import CapacityLimiter
from fastapi import Depends, Path, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from fastapi.routing import APIRoute

from api.board import Board
from api.handlers import did_you_mean
from api.liveness import CoordinatorWatch
from api.problems import FieldError, InvalidRequest, JobNotFound
from api.submission import Submitter
from muster.contracts.errors import InvalidSpec
from muster.contracts.job import JobId, JobStatus
from muster.contracts.layout import DataDirectory
from muster.contracts.spec import checked_job_id
from store.database import Database
from store.events import Events
from store.idempotency import Answers
from store.jobs import Jobs
from store.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDesk:
    """The store, the files and the clock of one running service."""

    database: Database
    jobs: Jobs
    workers: Workers
    events: Events
    answers: Answers
    board: Board
    coordinator: CoordinatorWatch
    submitter: Submitter
    files: DataDirectory
    log_readers: CapacityLimiter
    """Streams read files in threads of their own number, so that they hold up nobody else."""
    clock: Callable[[], datetime]
    started_at: datetime
    version: str


# Dependencies are coroutines: they wait for nothing, and need no thread of the pool.
async def _desk(request: Request) -> FrontDesk:
    return cast(FrontDesk, request.app.state.desk)


Desk = Annotated[FrontDesk, Depends(_desk)]


async def principal(request: Request) -> str:
    """Return who is asking; the door has let nobody else in."""
    return f"uid:{request.scope.get('state', {}).get('caller_uid')}"


Principal = Annotated[str, Depends(principal)]


async def refuse_unknown_query(request: Request) -> None:
    """Refuse query names that the route does not have: a typing error must not widen a purge."""
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
