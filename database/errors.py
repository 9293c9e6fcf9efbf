"""What the database can refuse.

DatabaseError                   also raised itself: the database refused a statement or a value
├── DatabaseUnavailable         away, full, unwritable, or no database at all
│   ├── DatabaseLocked          another process held its lock for too long
│   ├── DatabaseFull            its disk has no room left
│   └── CommitInDoubt           the connection was lost during the commit
├── SchemaRefused               a later version has migrated it, or a build before 0.1.0 made it
├── JobExists                   the id is taken
├── JobMissing                  no job has this id, or another job has it now
├── JobNotTerminal              only possible when the job is over
├── JobOver                     only possible while the job goes on and no stop is requested
├── JobChanged                  the job's row has changed since the caller read it
├── MemberMissing               the job never had this worker
├── DepartureRefused            this worker cannot be asked to leave now
├── PoolFull                    the job has as many ranks as it may have
├── LeaseLost                   fenced: another coordinator holds the lease
├── IdempotencyConflict         the key was used before, for another request
├── TokenExists                 a token that was not revoked has this name, expired or not
└── TokenMissing                no valid token has this name

After each of them except `CommitInDoubt` the transaction has left no trace.
"""

from muster.contracts.errors import MusterError
from muster.contracts.job.status import JobId, JobStatus


class DatabaseError(MusterError):
    """The database could not do what was asked."""


class DatabaseUnavailable(DatabaseError):
    """The database cannot be used now; the request itself may be fine."""


class DatabaseLocked(DatabaseUnavailable):
    """Another process held the database's lock for longer than the busy timeout."""


class DatabaseFull(DatabaseUnavailable):
    """The disk of the database has no room left; nothing is written."""


class CommitInDoubt(DatabaseUnavailable):
    """The commit was not acknowledged: the transaction may or may not be durable."""


class SchemaRefused(DatabaseError):
    def __init__(self, place: str, revision: str) -> None:
        why = (
            f"has schema revision {revision}, which this version of Muster does not know: upgrade "
            "Muster, or use another database"
        )
        if revision.isdecimal():  # builds before 0.1.0 numbered theirs without the r
            why = (
                "was made by a build before 0.1.0: end its jobs with that build, move the database "
                "away, and continue from their checkpoints with resume_from"
            )
        super().__init__(f"the database {place} {why}")
        self.revision = revision


class JobExists(DatabaseError):
    def __init__(self, job_id: JobId) -> None:
        super().__init__(f"job {job_id} exists already: choose another id, or delete it first")
        self.job_id = job_id


class JobMissing(DatabaseError):
    def __init__(self, job_id: JobId) -> None:
        super().__init__(f"there is no job {job_id}: list the jobs to see what there is")


class JobNotTerminal(DatabaseError):
    def __init__(self, job_id: JobId, status: JobStatus) -> None:
        super().__init__(f"job {job_id} is {status.value}: stop it and wait until it is over")


class JobOver(DatabaseError):
    def __init__(self, job_id: JobId, status: JobStatus) -> None:
        super().__init__(
            f"job {job_id} is {status.value} and can no longer be changed: submit another with "
            f"resume_from={job_id} to continue from its checkpoints"
        )


class JobChanged(DatabaseError):
    def __init__(self, job_id: JobId) -> None:
        super().__init__(f"job {job_id} has changed since you read it: read it again, and repeat")


class CheckpointPending(DatabaseError):
    def __init__(self, job_id: JobId) -> None:
        super().__init__(
            f"job {job_id} already saves a requested checkpoint: wait until that is durable"
        )


class MemberMissing(DatabaseError):
    def __init__(self, job_id: JobId, worker_id: int | str) -> None:
        super().__init__(
            f"job {job_id} has no worker {worker_id}: list its workers to see what there is"
        )


class DepartureRefused(DatabaseError):
    """The worker stays; `why` completes the sentence."""

    def __init__(self, job_id: JobId, worker_id: int, why: str) -> None:
        super().__init__(f"worker {worker_id} of job {job_id} cannot be asked to leave: {why}")


class PoolFull(DatabaseError):
    def __init__(self, job_id: JobId, limit: int) -> None:
        super().__init__(
            f"job {job_id} already has its maximum of {limit} workers: ask one to leave first, or "
            "submit the job with a larger max_workers"
        )


class LeaseLost(DatabaseError):
    """Another coordinator holds the lease, or it is free; the former holder must stop deciding."""

    def __init__(self, name: str, epoch: int) -> None:
        super().__init__(
            f"the lease {name!r} is no longer held with epoch {epoch}: stop deciding, "
            "and compete for it again"
        )


class IdempotencyConflict(DatabaseError):
    def __init__(self, key: str) -> None:
        super().__init__(
            f"the idempotency key {key!r} was used for a different request: use a new key"
        )


class TokenExists(DatabaseError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is a token {name} already: revoke it first, or choose another name"
        )


class TokenMissing(DatabaseError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no token {name} to revoke: list the tokens to see what there is"
        )
