"""The verdict on a job's reading: was every sample used exactly once? Pure: rows in, views out."""

from api.pool_schemas import AuditView, CheckpointView, EpochView
from muster.contracts.job import JobStatus
from store.records import Audit, Commit, EpochRecord, Job


def audit_view(job: Job, audit: Audit) -> AuditView:
    """Return what is proved so far; of an independent job, nothing ever is."""
    complete = job.spec.mode == "synchronous" and job.status is JobStatus.COMPLETED
    return AuditView(
        job_id=job.job_id,
        complete=complete,
        exactly_once=_verdict(job, audit, complete=complete),
        epochs=[_epoch_view(epoch, complete=complete) for epoch in audit.epochs],
        epochs_omitted=audit.epochs_omitted,
        checkpoints=[_checkpoint_view(commit) for commit in audit.commits],
        checkpoints_omitted=audit.commits_omitted,
    )


def _verdict(job: Job, audit: Audit, *, complete: bool) -> bool | None:
    if audit.inexact:
        return False
    # An epoch that is missing, or short at the end, is samples nobody has read.
    return audit.exact >= job.spec.epochs if complete else None


def _epoch_view(epoch: EpochRecord, *, complete: bool) -> EpochView:
    return EpochView(
        epoch=epoch.epoch,
        samples=epoch.samples,
        expected_samples=epoch.expected_samples,
        hash=_hex(epoch.hash_sum),
        expected_hash=_hex(epoch.expected_hash_sum),
        exactly_once=bool(epoch.exactly_once) if complete else epoch.exactly_once,
    )


def _checkpoint_view(commit: Commit) -> CheckpointView:
    return CheckpointView(
        step=commit.step,
        epoch=commit.epoch,
        generation=commit.generation,
        digest=commit.digest,
        saved_at=commit.saved_at,
    )


def _hex(hash_sum: int) -> str:
    return f"{hash_sum:016x}"
