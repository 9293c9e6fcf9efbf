"""What a coordinator leaves behind in rows, and the story as the next one takes it up."""

from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime

from stories import Story

from coordinator.moment import Moment
from coordinator.pool_rows import members_of
from coordinator.rows import Attachment, change_of, snapshot_of, workers_of
from coordinator.snapshot import JobSnapshot
from muster.contracts.job import StopRequest
from store.records import Job, Worker

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def rows_of(
    job: JobSnapshot, now: float = 1000.0, stop: StopRequest | None = None
) -> tuple[Job, list[Worker]]:
    """Return the rows that this coordinator leaves behind."""
    moment = Moment(monotonic=now, wall=NOON)
    change = change_of(job, Attachment(started_at=None), moment)
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
        pause_request=job.pause_asked,
    )
    return row, workers_of(job, moment)


def successor(
    story: Story,
    take_up: Callable[..., JobSnapshot] = snapshot_of,
    *,
    stop: StopRequest | None = None,
) -> Story:
    """Return the story on the next coordinator's clock; by default every process was ended."""
    row, workers = rows_of(story.job, story.now, stop)
    pool = members_of(story.job, Moment(monotonic=story.now, wall=NOON))
    taken_up = Story(take_up(row, workers, pool, Moment(monotonic=5.0, wall=NOON)), now=5.0)
    return taken_up if stop is None else taken_up.is_stopped(stop)
