"""What can go wrong between a caller and the rows.

StoreError                      also raised itself: the database refused a statement or a value
├── StoreUnavailable            away, full, unwritable, or no database at all
│   ├── StoreLocked             another process kept it for too long
│   └── CommitInDoubt           it was lost while it was asked to make a transaction durable
├── StoreNewer                  the database was migrated by a later version of Muster
├── JobExists                   the id is taken
├── JobMissing                  no job has this id (or no longer this job)
├── JobNotTerminal              what was asked for needs a job that is over
├── JobOver                     what was asked for needs a job that goes on
├── JobChanged                  the job is not any more what the caller has seen of it
├── MemberMissing               the job has never had this worker
├── DepartureRefused            this worker cannot be asked to leave now
├── LeaseLost                   fenced: another coordinator decides now
├── IdempotencyConflict         the key was used before, for another request
├── TokenExists                 a token has this name already
└── TokenMissing                no token that could be revoked has this name

After each of them but `CommitInDoubt` the transaction has left no trace.
"""

from muster.contracts.errors import MusterError
from muster.contracts.job import JobId, JobStatus


class StoreError(MusterError):
    """The database could not do what was asked."""


class StoreUnavailable(StoreError):
    """The database cannot be used now; nothing is known to be wrong with the request."""


class StoreLocked(StoreUnavailable):
    """Another process has had the database for itself for longer than anybody should."""


class CommitInDoubt(StoreUnavailable):
    """Nobody knows whether the transaction is durable: there was no answer to its commit."""


class StoreNewer(StoreError):
    """The database has a schema that this version does not know."""

    def __init__(self, place: str, revision: str) -> None:
        super().__init__(
            f"the database {place} has schema revision {revision}, which this version of Muster "
            "does not know: upgrade Muster, or use another database"
        )
        self.revision = revision


class JobExists(StoreError):
    """The id belongs to a job already."""

    def __init__(self, job_id: JobId) -> None:
        super().__init__(f"job {job_id} exists already: choose another id, or delete it first")
        self.job_id = job_id


class JobMissing(StoreError):
    """No job has the id."""

    def __init__(self, job_id: JobId) -> None:
        super().__init__(f"there is no job {job_id}: list the jobs to see what there is")
        self.job_id = job_id


class JobNotTerminal(StoreError):
    """The job is not over."""

    def __init__(self, job_id: JobId, status: JobStatus) -> None:
        super().__init__(f"job {job_id} is {status.value}: stop it and wait until it is over")
        self.job_id = job_id
        self.status = status


class JobOver(StoreError):
    """The job is over, or was asked to end."""

    def __init__(self, job_id: JobId, status: JobStatus) -> None:
        super().__init__(
            f"job {job_id} is {status.value} and can be changed no more: submit another, with "
            f"resume_from={job_id} to go on from its checkpoints"
        )
        self.job_id = job_id
        self.status = status


class JobChanged(StoreError):
    """The job's row is in a later version than the caller's."""

    def __init__(self, job_id: JobId) -> None:
        super().__init__(f"job {job_id} has changed since you looked: look again, and repeat")
        self.job_id = job_id


class MemberMissing(StoreError):
    """The pool of the job has no worker of this id, living or gone."""

    def __init__(self, job_id: JobId, worker_id: int) -> None:
        super().__init__(
            f"job {job_id} has no worker {worker_id}: list its workers to see what there is"
        )
        self.job_id = job_id
        self.worker_id = worker_id


class DepartureRefused(StoreError):
    """The worker stays; `why` completes the sentence."""

    def __init__(self, job_id: JobId, worker_id: int, why: str) -> None:
        super().__init__(f"worker {worker_id} of job {job_id} cannot be asked to leave: {why}")
        self.job_id = job_id
        self.worker_id = worker_id


class LeaseLost(StoreError):
    """Somebody else holds the lease, or nobody; its former holder must stop deciding."""

    def __init__(self, name: str, epoch: int) -> None:
        super().__init__(
            f"the lease {name!r} is no longer held with epoch {epoch}: stop deciding, "
            "and compete for it again"
        )
        self.name = name
        self.epoch = epoch


class IdempotencyConflict(StoreError):
    """One key, two requests."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the idempotency key {key!r} was used for a different request: use a new key"
        )
        self.key = key


class TokenExists(StoreError):
    """The name belongs to a token that was not revoked, expired or not."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is a token {name} already: revoke it first, or choose another name"
        )
        self.name = name


class TokenMissing(StoreError):
    """There is no such token, or it was revoked before."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no token {name} to revoke: list the tokens to see what there is"
        )
        self.name = name
