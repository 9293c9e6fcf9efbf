"""The rows of one coordinator, and the story under the next one."""

from collections.abc import Collection
from dataclasses import fields
from datetime import UTC, datetime

from coordinator.decide.state.job import JobSnapshot
from coordinator.persistence import (
    Attachment,
    Moment,
    agent_rows,
    job_row,
    member_rows,
    rank_rows,
)
from coordinator.restore import JobRows, snapshot_of
from database.records import Job
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job import StopRequest
from tests.support.stories import Story, queued_job

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def rows_of(job: JobSnapshot, now: float = 1000.0, stop: StopRequest | None = None) -> JobRows:
    """Return the rows of this job."""
    moment, attachment = Moment(monotonic=now, wall=NOON), Attachment(started_at=None)
    change = job_row(job, attachment, moment)
    written = {field.name: getattr(change, field.name) for field in fields(change)}
    row = Job(
        **written,
        spec=job.spec,
        created_at=NOON,
        updated_at=NOON,
        stop_request=stop,
        stop_grace_seconds=None,
        version=1,
        wanted_world_size=job.wanted_world_size,
        wanted_hosts=dict(job.wanted_hosts),
        pause_request=job.pause_requested,
        checkpoint_requests=job.checkpoint_requests,
    )
    return JobRows(
        job=row,
        agents=agent_rows(job, attachment),
        ranks=rank_rows(job, moment),
        members=member_rows(job, moment),
    )


def successor(
    story: Story,
    *,
    agents: Collection[str] = (),
    living: Collection[int] = (),
    stop: StopRequest | None = None,
) -> Story:
    """Return the story under the next coordinator; by default no process is left."""
    rows, now = rows_of(story.job, story.now, stop), Moment(monotonic=5.0, wall=NOON)
    hosts = queued_job().hosts
    job = snapshot_of(rows, now, hosts=hosts, node=LOCAL_HOST, agents=agents, living=living)
    taken_up = Story(job, now=5.0, saved=story.saved)
    return taken_up if stop is None else taken_up.is_stopped(stop)
