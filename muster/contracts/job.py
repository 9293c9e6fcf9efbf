"""The life of a job: its statuses, the legal moves between them, and the reasons beside them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NewType

from muster.contracts.errors import IllegalMove

JobId = NewType("JobId", str)
"""The name people use: chosen by the caller or made for them, and free again after a delete."""

JobUid = NewType("JobUid", str)
"""The identity of one job for ever: in its checkpoints' manifests and its processes' marks."""


class JobStatus(StrEnum):
    """What is true of a job while it has this status."""

    QUEUED = "QUEUED"
    """Accepted and durable; no process of it runs, it waits for slots or for a coordinator."""
    STARTING = "STARTING"
    """Claimed; its agent and ranks are being started, and not every rank is alive yet."""
    RUNNING = "RUNNING"
    """Every rank that has work is alive or has finished."""
    RECOVERING = "RECOVERING"
    """At least one rank is down and will be replaced; the others go on, or start again with it."""
    PAUSED = "PAUSED"
    """No step is taken, because too few ranks are active or a person asked for it."""
    STOPPING = "STOPPING"
    """It is to end, as somebody asked or as it cannot go on; ranks are saving and exiting."""
    COMPLETED = "COMPLETED"
    """Every rank exited with code 0."""
    FAILED = "FAILED"
    """It cannot go on; reason and message say why."""
    STOPPED = "STOPPED"
    """It ended because somebody asked; its checkpoints are there to go on from."""


TERMINAL: Final = frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.STOPPED})
OPEN: Final = frozenset(JobStatus) - TERMINAL

EXIT_CODES: Final[Mapping[JobStatus, int]] = {
    JobStatus.COMPLETED: 0,
    JobStatus.FAILED: 1,
    JobStatus.STOPPED: 8,
}
"""What a process ends with that has seen a job to its end; no other end of one is 8."""

_S = JobStatus
TRANSITIONS: Final[Mapping[JobStatus, frozenset[JobStatus]]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.STOPPED, _S.FAILED}),
    _S.STARTING: frozenset(
        {_S.RUNNING, _S.RECOVERING, _S.STOPPING, _S.COMPLETED, _S.FAILED, _S.QUEUED}
    ),
    _S.RUNNING: frozenset({_S.RECOVERING, _S.PAUSED, _S.STOPPING, _S.COMPLETED, _S.FAILED}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.PAUSED, _S.STOPPING, _S.COMPLETED, _S.FAILED}),
    # COMPLETED: who is left may be too few to train, and have nothing more to do.
    _S.PAUSED: frozenset({_S.RUNNING, _S.RECOVERING, _S.STOPPING, _S.COMPLETED, _S.FAILED}),
    # Back to QUEUED when the whole service was told to shut down: the job resumes at the next up.
    _S.STOPPING: frozenset({_S.STOPPED, _S.COMPLETED, _S.FAILED, _S.QUEUED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.STOPPED: frozenset(),
}


def move(current: JobStatus, target: JobStatus) -> JobStatus:
    """Return `target`, or raise `IllegalMove` if the table does not allow it."""
    if target not in TRANSITIONS[current]:
        raise IllegalMove(current, target)
    return target


class Reason(StrEnum):
    """Why a job is where it is, for machines. An open set: clients must accept new words."""

    WAITING_FOR_SLOTS = "waiting_for_slots"
    INTERRUPTED = "interrupted"
    """The service was shut down; the job resumes at the next start."""
    COORDINATOR_RESTARTED = "coordinator_restarted"
    AGENT_LOST = "agent_lost"
    WORKER_EXITED = "worker_exited"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    NO_PROGRESS = "no_progress"
    START_TIMEOUT = "start_timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    """Somebody else asked a rank to stop."""
    GANG_RESTARTED = "gang_restarted"
    """Another rank of its gang had died, and all of them are started again."""
    HOST_EXHAUSTED = "host_exhausted"
    """A host had no process, descriptor or room for a rank when it was to be started."""
    DO_NOT_RETRY = "do_not_retry"
    """A rank exited with the code that says so."""
    DIFFERENT_BITS = "different_bits"
    """A worker held other bits than the others of its group."""
    TOO_FEW_WORKERS = "too_few_workers"
    PAUSED_BY_USER = "paused_by_user"
    RESTART_LIMIT = "restart_limit"
    INVALID_PROGRAM = "invalid_program"
    INVALID_DATASET = "invalid_dataset"
    INVALID_CHECKPOINT = "invalid_checkpoint"
    SECRET_UNAVAILABLE = "secret_unavailable"  # noqa: S105  a word
    """What the job refers to is not there, or not kept as a secret is."""
    STOPPED_BY_USER = "stopped_by_user"


class StopRequest(StrEnum):
    """What the person wants to happen to a job that is not over."""

    GRACEFUL = "graceful"
    """SIGTERM, a last checkpoint, and SIGKILL only after the grace period."""
    FORCED = "forced"
    """SIGKILL at once."""
