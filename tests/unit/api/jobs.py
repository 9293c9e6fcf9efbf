"""A job as it comes out of the store, for tests that need one."""

from datetime import UTC, datetime

from database.records import Job
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)

JOB = Job(
    job_id=JobId("a"),
    uid=JobUid("u"),
    spec=JobSpec(world_size=2),
    status=JobStatus.RUNNING,
    reason=None,
    message=None,
    created_at=NOW,
    updated_at=NOW,
    started_at=NOW,
    finished_at=None,
    exit_code=None,
    stop_request=None,
    stop_grace_seconds=None,
    version=1,
)
