"""What a route may use, in one value that the wiring hands to the application."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, cast

from fastapi import Depends, Request

from api.feeds import Feeds
from api.glances import Glances
from api.identity import Caller
from api.intake import Intake
from api.liveness import CoordinatorWatch
from api.nudge import Nudge
from api.searches import Searches
from api.submission import Submitter
from muster.contracts.job import JobId, JobUid, StopRequest
from muster.contracts.layout import DataDirectory
from store.commits import Commits
from store.database import Database
from store.events import Events
from store.idempotency import Answers
from store.incarnations import Incarnations
from store.jobs import Jobs
from store.members import Members
from store.records import Job
from store.tokens import Tokens
from store.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDesk:
    """The store, the files and the clock of one running service."""

    database: Database
    jobs: Jobs
    workers: Workers
    members: Members
    incarnations: Incarnations
    commits: Commits
    events: Events
    answers: Answers
    tokens: Tokens
    glances: Glances
    coordinator: CoordinatorWatch
    nudge: Nudge
    """To be called when a row for the coordinator was written."""
    submitter: Submitter
    intake: Intake
    files: DataDirectory
    feeds: Feeds
    """What streams follow."""
    is_closing: Callable[[], bool]
    """Whether the service ends: whoever waits is to be answered now."""
    searches: Searches
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
        """Do as `Jobs.request_stop` does, and let the coordinator know."""
        job = self.jobs.request_stop(job_id, request, grace_seconds, why, actor=actor, uid=uid)
        self.nudge()
        return job


# Dependencies are coroutines: they wait for nothing, and need no thread of the pool.
async def _desk(request: Request) -> FrontDesk:
    return cast(FrontDesk, request.app.state.desk)


Desk = Annotated[FrontDesk, Depends(_desk)]


async def _caller(request: Request) -> Caller:
    """Return who is asking; the door has let nobody else in."""
    return cast(Caller, request.scope["state"]["caller"])


Asking = Annotated[Caller, Depends(_caller)]


async def principal(caller: Asking) -> str:
    """Return the name of who is asking."""
    return caller.name


Principal = Annotated[str, Depends(principal)]
