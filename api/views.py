"""Rows as people see them."""

from typing import Any

import msgspec

from api.schemas import EventView, JobView
from store.records import Event, Job


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
    """Return the public face of a job's row."""
    return JobView(
        **heading(job),
        job_uid=job.uid,
        exit_code=job.exit_code,
        is_terminal=job.is_terminal,
        stop_requested=job.stop_request is not None,
        pause_requested=job.pause_request,
        spec=msgspec.to_builtins(job.spec),
    )


def event_view(event: Event) -> EventView:
    """Return the public face of an event's row."""
    return EventView(
        at=event.at,
        kind=event.kind,
        message=event.message,
        rank=event.rank,
        incarnation=event.incarnation,
        actor=event.actor,
    )
