"""A question that is answered when something has become true of a job: the long poll.

Who waits holds no thread, and looks at the glances that streams share: any number of waits for one
job cost one look at the database every tenth of a second.
"""

import asyncio
from collections.abc import Collection
from typing import Final

from fastapi import Request

from api.desk import FrontDesk
from api.glances import FRESH_SECONDS, Glance
from api.problems import JobNotFound
from api.queries import statuses_of
from muster.contracts.job import TERMINAL, JobId, JobStatus
from store.records import Job

WAIT_LIMIT_SECONDS: Final = 60.0
"""Proxies take a connection that says nothing for longer to be dead."""

UNTIL_TERMINAL: Final = "terminal"


def awaited_statuses(words: list[str]) -> Collection[JobStatus]:
    """Return the statuses that end a wait for `words`: a job that is over has no other to come."""
    named = [word for word in words if word.lower() != UNTIL_TERMINAL]
    return TERMINAL | (frozenset(statuses_of(named, "until")) if named else frozenset())


async def awaited(
    desk: FrontDesk,
    request: Request,
    job_id: JobId,
    wanted: Collection[JobStatus],
    patience_seconds: float,
) -> Job:
    """Return the job when it has a wanted status, or as it is when patience is at its end.

    Or when nobody waits any more, or this service ends. Raises `JobNotFound` as soon as it is
    known that there is no such job, or no longer this one.
    """
    deadline = asyncio.get_running_loop().time() + patience_seconds
    # A glance may be older than what this client has just been told elsewhere, and of another job.
    job = _job_in(await desk.glances.look_anew(job_id))
    uid = job.uid
    while job.status_shown not in wanted and not desk.is_closing():
        if asyncio.get_running_loop().time() >= deadline or await request.is_disconnected():
            break
        await asyncio.sleep(FRESH_SECONDS)
        job = _job_in(await desk.glances.look(job_id))
        if job.uid != uid:
            raise JobNotFound
    return job


def _job_in(glance: Glance | None) -> Job:
    if glance is None:
        raise JobNotFound
    return glance.job
