"""FastAPI dependencies: the application's state, the caller, and the scope a route requires.

Every route declares its scope, ``@router.post("/jobs", dependencies=[SUBMIT])``, so it is in the
OpenAPI document as well.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias, cast

from anyio import CapacityLimiter
from fastapi import APIRouter, Depends, Request, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer, SecurityScopes

from api.auth import CHANGING_METHODS, Caller, log_refusal, require_scope
from api.coordinator_link import CoordinatorWatch
from api.errors import Problem
from api.streams import JobCache, LogBroadcast
from api.submission import SubmissionQueue, Submitter
from database.engine import Database
from database.idempotency import Answers
from database.jobs import Jobs
from database.records import Job
from database.tokens import Tokens
from database.workers import Attempts, CheckpointLog, Events, Members, Ranks
from muster.contracts.job import JobId, JobUid, StopRequest
from muster.contracts.paths import DataDir
from muster.contracts.token import Scope

API_VERSION: Final = "v1"
PREFIX: Final = f"/api/{API_VERSION}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """Everything that the routes of one running service use."""

    database: Database
    jobs: Jobs
    workers: Ranks
    members: Members
    incarnations: Attempts
    commits: CheckpointLog
    events: Events
    answers: Answers
    tokens: Tokens
    job_cache: JobCache
    log_broadcast: LogBroadcast
    log_searches: CapacityLimiter
    """Threads for searches in logs, so that these do not hold up other routes."""
    coordinator: CoordinatorWatch
    wake_coordinator: Callable[[], None]
    """To be called after writing a row that the coordinator reads."""
    submitter: Submitter
    intake: SubmissionQueue
    files: DataDir
    is_closing: Callable[[], bool]
    """True when the service stops, so that waiting requests must be answered."""
    clock: Callable[[], datetime]
    uptime_seconds: Callable[[], float]
    version: str

    def request_stop(
        self,
        job_id: JobId,
        request: StopRequest,
        grace_seconds: float | None,
        *,
        actor: str,
        why: str | None = None,
        uid: JobUid | None = None,
    ) -> Job:
        """Do as `Jobs.request_stop` and wake the coordinator."""
        job = self.jobs.request_stop(job_id, request, grace_seconds, why, actor=actor, uid=uid)
        self.wake_coordinator()
        return job


# These dependencies are coroutines because FastAPI runs plain functions in a thread.
async def _state(request: Request) -> AppState:
    return cast(AppState, request.app.state.app_state)


State = Annotated[AppState, Depends(_state)]


async def _caller(request: Request) -> Caller:
    return cast(Caller, request.scope["state"]["caller"])


CurrentCaller = Annotated[Caller, Depends(_caller)]


async def caller_name(caller: CurrentCaller) -> str:
    return caller.name


CallerName = Annotated[str, Depends(caller_name)]

Reauthenticate: TypeAlias = Callable[[], Awaitable[None]]
"""Authenticates the caller again; raises `Problem` if the token was revoked or has expired."""


async def reauthenticate(request: Request) -> None:
    """Authenticate the caller of a request again; raise `Problem`, and log it."""
    try:
        await request.scope["state"]["authenticate"]()
    except Problem as problem:
        log_refusal(problem, request.scope)
        raise


async def _reauthentication(request: Request) -> Reauthenticate:
    return lambda: reauthenticate(request)


Reauthentication = Annotated[Reauthenticate, Depends(_reauthentication)]
"""For a route that waits before it changes something, or that streams for a long time."""

_BEARER: Final = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="Created with `muster token create`; the service's own user on its machine needs "
    "none.",
)


async def _check_scope(
    request: Request, needed: SecurityScopes, _shown: Annotated[object, Depends(_BEARER)]
) -> None:
    if request.method in CHANGING_METHODS:
        # The body may have taken seconds to arrive since the middleware authenticated the caller.
        await reauthenticate(request)
    try:
        require_scope(request.scope["state"]["caller"], Scope(needed.scopes[-1]))
    except Problem as problem:
        log_refusal(problem, request.scope)
        raise


async def _anonymous() -> None:
    """Allow callers without a token."""


READ: Final = Security(_check_scope, scopes=[Scope.READ])
SUBMIT: Final = Security(_check_scope, scopes=[Scope.SUBMIT])
ADMIN: Final = Security(_check_scope, scopes=[Scope.ADMIN])
OPEN: Final = Depends(_anonymous)
"""For probes only: `AccessMiddleware` admits anonymous requests to no other path."""

_DECLARATIONS: Final[tuple[Any, ...]] = (READ, SUBMIT, ADMIN, OPEN)


class ScopeMissing(LookupError):
    """A route declares no scope. This is a bug."""


def refuse_undeclared(router: APIRouter) -> None:
    """Raise `ScopeMissing` if a route declares no scope."""
    for route in router.routes:
        if isinstance(route, APIRoute) and not any(
            needed is declared for needed in route.dependencies for declared in _DECLARATIONS
        ):
            raise ScopeMissing(f"{route.path} ({route.name}) declares no scope")
