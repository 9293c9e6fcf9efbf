"""Rows as people see them."""

from typing import Any, Final

import msgspec

from api.identity import Caller
from api.schemas import EventView, JobView
from muster.contracts.token import Scope
from store.records import Event, Job

HIDDEN: Final = "…"
"""In the place of a value that this caller may not see."""


def heading(job: Job) -> dict[str, Any]:
    """Return the fields of `JobHeading`."""
    return {
        "job_id": job.job_id,
        "name": job.spec.name,
        "status": job.status_shown,
        "reason": job.reason,
        "message": job.message,
        "world_size": job.world_size,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
    }


def job_view(job: Job) -> JobView:
    """Return the face of a job's row for those who may change it."""
    return JobView(
        **heading(job),
        job_uid=job.uid,
        exit_code=job.exit_code,
        is_terminal=job.is_terminal,
        stop_requested=job.stop_request is not None,
        pause_requested=job.pause_request,
        spec=msgspec.to_builtins(job.spec),
    )


def job_seen_by(caller: Caller, job: Job) -> JobView:
    """Return the face of a job's row for whoever looks at it.

    An environment often holds keys, where people put them in spite of all: who may not submit jobs
    sees its names.
    """
    view = job_view(job)
    if not caller.scope.covers(Scope.SUBMIT):
        view.spec["env"] = dict.fromkeys(view.spec["env"], HIDDEN)
    return view


def event_view(event: Event) -> EventView:
    """Return the public face of an event's row."""
    return EventView(
        event_id=event.event_id,
        at=event.at,
        kind=event.kind,
        message=event.message,
        rank=event.rank,
        incarnation=event.incarnation,
        actor=event.actor,
    )
