"""Which jobs may be scaled and paused, and how far; independent ones may not, and are told why."""

from api.problems import Conflict, invalid_field
from store.errors import JobOver
from store.records import Job


def check_world_size(job: Job, world_size: int) -> None:
    """Raise `Conflict` or `InvalidRequest` unless `job` may have that many ranks."""
    if job.spec.mode == "independent":
        raise Conflict(
            "keeps-its-world-size",
            f"{job.job_id} is independent: which rank reads which shard follows from their number, "
            f"so it keeps its world size of {job.world_size}. A job of mode synchronous can be "
            "scaled.",
        )
    low, high = job.spec.min_workers, job.spec.largest_world_size
    if not low <= world_size <= high:
        raise invalid_field(
            "body",
            "world_size",
            f"this job takes {low} to {high} ranks: its min_workers and its max_workers",
        )


def check_pausable(job: Job) -> None:
    """Raise `JobOver`, or `Conflict` unless the ranks of `job` take their steps together."""
    if job.is_terminal:
        raise JobOver(job.job_id, job.status)
    if job.spec.mode == "independent":
        raise Conflict(
            "never-pauses",
            f"{job.job_id} is independent: its ranks share no step before which to pause. Stop it "
            f"(POST /jobs/{job.job_id}/stop) and go on later with resume_from.",
        )


def check_lets_go(job: Job) -> None:
    """Raise `Conflict` unless single workers of `job` may leave."""
    if job.spec.mode == "independent":
        raise Conflict(
            "keeps-its-world-size",
            f"{job.job_id} is independent: nobody would take over the shards of a rank that "
            "leaves. Workers of a job of mode synchronous can be asked to.",
        )
