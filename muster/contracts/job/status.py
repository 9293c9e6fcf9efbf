"""The states of a job: statuses, legal transitions, and the reasons beside them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NewType

JobId = NewType("JobId", str)
"""The name people use: chosen by the caller or generated, and free again after a delete."""

JobUid = NewType("JobUid", str)
"""The permanent identity of a job: in the manifests of its checkpoints and its process tags."""


class JobStatus(StrEnum):
    """The status of a job."""

    QUEUED = "QUEUED"
    """Accepted and durable, without a process; it waits for slots or for a coordinator."""
    STARTING = "STARTING"  # claimed by a coordinator; its agent and ranks are being started
    RUNNING = "RUNNING"  # every rank is alive or has finished
    RECOVERING = "RECOVERING"
    """At least one rank is down and will be replaced; the others go on, or restart with it."""
    PAUSED = "PAUSED"  # no step is taken, because too few ranks are active or a user asked for it
    STOPPING = "STOPPING"  # its ranks are saving and exiting, because of a request or a failure
    COMPLETED = "COMPLETED"  # every rank exited with code 0
    FAILED = "FAILED"  # it cannot continue; reason and message say why
    STOPPED = "STOPPED"  # it ended on request; another job can resume from its checkpoints


TERMINAL: Final = frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.STOPPED})
OPEN: Final = frozenset(JobStatus) - TERMINAL

EXIT_CODES: Final[Mapping[JobStatus, int]] = {
    JobStatus.COMPLETED: 0,
    JobStatus.FAILED: 1,
    JobStatus.STOPPED: 8,
}
"""Exit codes of a command that watches a job until its end; 8 has no other meaning."""

_S = JobStatus
TRANSITIONS: Final[Mapping[JobStatus, frozenset[JobStatus]]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.STOPPED, _S.FAILED}),
    _S.STARTING: frozenset(
        {_S.RUNNING, _S.RECOVERING, _S.STOPPING, _S.COMPLETED, _S.FAILED, _S.QUEUED}
    ),
    _S.RUNNING: frozenset({_S.RECOVERING, _S.PAUSED, _S.STOPPING, _S.COMPLETED, _S.FAILED}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.PAUSED, _S.STOPPING, _S.COMPLETED, _S.FAILED}),
    # COMPLETED: the remaining ranks may be too few to train, but may have finished.
    _S.PAUSED: frozenset({_S.RUNNING, _S.RECOVERING, _S.STOPPING, _S.COMPLETED, _S.FAILED}),
    # Back to QUEUED when the whole service shuts down: the job resumes at the next `muster up`.
    _S.STOPPING: frozenset({_S.STOPPED, _S.COMPLETED, _S.FAILED, _S.QUEUED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.STOPPED: frozenset(),
}


class Reason(StrEnum):
    """Why a job is where it is, for machines. An open set: clients must accept new words."""

    WAITING_FOR_SLOTS = "waiting_for_slots"
    INTERRUPTED = "interrupted"  # the service was shut down; the job resumes at the next start
    COORDINATOR_RESTARTED = "coordinator_restarted"
    AGENT_LOST = "agent_lost"
    HOST_LOST = "host_lost"  # a host did not answer, so its ranks are started elsewhere
    WORKER_EXITED = "worker_exited"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    NO_PROGRESS = "no_progress"
    START_TIMEOUT = "start_timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"  # a rank received SIGTERM from outside Muster
    GANG_RESTARTED = "gang_restarted"  # a rank of the gang died, so all of its ranks restart
    HOST_EXHAUSTED = "host_exhausted"
    """A host had no process, file descriptor, space or GPU memory left to start a rank."""
    DO_NOT_RETRY = "do_not_retry"  # a rank exited with the code that forbids a retry
    DIFFERENT_BITS = "different_bits"  # the state of a worker differed from that of its group
    CODE_CHANGED = "code_changed"  # a rank had other code than the job
    TOO_FEW_WORKERS = "too_few_workers"
    PAUSED_BY_USER = "paused_by_user"
    RESTART_LIMIT = "restart_limit"
    INVALID_PROGRAM = "invalid_program"
    INVALID_DATASET = "invalid_dataset"
    INVALID_CHECKPOINT = "invalid_checkpoint"
    ENGINE_REFUSED = "engine_refused"
    SECRET_UNAVAILABLE = "secret_unavailable"  # noqa: S105  a word
    """A secret of the job is missing, or other users may read it."""
    STOPPED_BY_USER = "stopped_by_user"


class StopRequest(StrEnum):
    """How a user wants a job to end."""

    GRACEFUL = "graceful"  # SIGTERM, a last checkpoint, and SIGKILL after the grace period
    FORCED = "forced"  # SIGKILL at once
