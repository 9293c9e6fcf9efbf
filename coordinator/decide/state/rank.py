"""One rank as the coordinator knows it: values that live as long as what they describe.

Times are seconds on the coordinator's monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from muster.contracts.agent import UNPLACED
from muster.contracts.errors import move
from muster.contracts.job.retry import RetryClass
from muster.contracts.job.status import Reason
from muster.contracts.messages.rank import Raised, Ready
from muster.contracts.rank import (
    NO_PROGRESS,
    TRANSITIONS,
    ProcessRecord,
    ProcessState,
    RankProgress,
)

NEVER: Final = float("-inf")

_WELL: Final = frozenset({ProcessState.LIVE, ProcessState.SUSPECT, ProcessState.EXITING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a process was ended, or has to be: a reason and a verb phrase for people."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended: its retry class, a reason and a verb phrase for people."""

    retry_class: RetryClass
    reason: Reason | None
    message: str
    is_mistake: bool = False  # the program named a mistake in its text or its arguments
    is_raised: bool = False  # the program raised an error in a step
    error: str = ""  # its line, if it names a missing path or key, or a wrong argument
    error_hosts: tuple[str, ...] = ()  # where each of the attempts in a row ran that ended with it


@dataclass(frozen=True, slots=True, kw_only=True)
class EndIntent:
    """Who has asked an attempt to end, and how."""

    terminated_at: float | None = None  # when we asked it to save and exit
    kill: Cause | None = None  # why we sent it SIGKILL
    killed_at: float = NEVER
    orphaned_by: str | None = None  # who stopped it while it had no coordinator or agent
    stopping: bool = False  # it reports that it was asked to stop, by us or by another process
    asked_at: float = NEVER  # when it was first asked to stop, as far as we know

    @property
    def is_ours(self) -> bool:
        """True if one of our processes (coordinator or agent) asked it to save and exit."""
        return self.terminated_at is not None or self.orphaned_by is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The part that an attempt takes in the group of a synchronous job."""

    ready: Ready | None = None  # the message with which it said that it can join a group
    joined_round: int = -1  # the group round that it has joined
    stepped_round: int = -1  # the group round in which it last reported a new step
    peer_lost_round: int = -1  # the group round in which it has lost a peer
    is_past_loop: bool = False  # its loop is over and durable, and its script goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Steps per second, and where and when they were last measured."""

    steps_per_sec: float = 0.0
    step: int = 0
    at: float = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The present or last process of a rank; the next start replaces it whole."""

    number: int = -1  # -1 before the first
    process: ProcessState = ProcessState.EXITED
    identity: ProcessRecord | None = None
    died: bool = False
    """The process that trains is gone; what it has started, or its script, may still run."""
    exit_code: int | None = None
    exit_signal: int | None = None
    spawned_at: float = NEVER
    live_at: float = NEVER  # when it first gave a sign of life
    seen_at: float = NEVER
    starved_seconds: float = 0.0  # for which it got no processor since its last sign of life
    progressed_at: float = NEVER
    stopped_at: float | None = None  # when its agent first saw it stopped (SIGSTOP)
    sends_heartbeats: bool = False  # it has said hello, so a missing heartbeat means something
    waiting: bool = False  # it reports that it waits for other ranks
    exiting_at: float = NEVER  # when it said that it exits
    is_slow_exit: bool = False  # an event says that it takes long
    intent: EndIntent = EndIntent()
    refused: Cause | None = None  # the permanent error that it reported
    raised: Raised | None = None  # the error that the program raised in a step
    warning: str | None = None  # its last one; an agent that reconnects repeats it
    step_at_start: int | None = None  # the step at which it began; None while unknown
    has_told_step: bool = False  # until then the rank's progress is of the previous attempt
    checkpoints_saved: int = 0
    throughput: Throughput = Throughput()
    worker_id: int | None = None  # in the pool of a synchronous job
    member: Membership = Membership()

    def healthy_seconds(self, now: float) -> float:
        """Return for how long it has given signs of life."""
        return 0.0 if self.live_at == NEVER else now - self.live_at

    def move(self, target: ProcessState) -> "Attempt":
        """Return the attempt with its process in another state, or still in the same one."""
        if self.process is target:
            return self
        return replace(self, process=move(TRANSITIONS, self.process, target))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudget:
    """What the ends of a rank's attempts leave of its retries (`coordinator.decide.fold_exit`)."""

    endings: Mapping[RetryClass, int] = field(default_factory=dict)  # attempts by class
    restarts: int = 0
    failures: int = 0  # failures in a row, for the backoff
    fruitless: int = 0  # failures in a row without progress that the program may have caused
    proven_step: int = -1  # where the job was at the last of those; at least 0 if it ever worked
    start_at: float = NEVER  # earliest start of the next attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One rank: its present attempt, if any, and what outlives attempts."""

    rank: int
    host: str = UNPLACED  # one that it has is kept until that is lost
    in_service: bool = True  # False: the job has left it out, it exits and is not replaced
    finished: bool = False
    """This rank has no work left: it exited with code 0, or says so and may still exit."""
    progress: RankProgress = NO_PROGRESS
    checkpoints_before: int = 0  # saved by earlier attempts
    ending: AttemptEnd | None = None  # how the last ended attempt ended
    trouble: Cause | None = None  # why the last attempt is gone; None once the next one is alive
    attempt: Attempt = Attempt()
    budget: RetryBudget = RetryBudget()

    @property
    def is_alive(self) -> bool:
        """True if a process of this rank may exist."""
        return self.attempt.process is not ProcessState.EXITED

    @property
    def is_exiting(self) -> bool:
        """True if its process runs its exit handlers: it computes nothing any more."""
        return self.attempt.process is ProcessState.EXITING

    @property
    def has_progressed(self) -> bool:
        """True if this attempt has taken a step or saved a checkpoint."""
        began = self.attempt.step_at_start
        has_stepped = began is not None and self.progress.step > began
        return has_stepped or self.attempt.checkpoints_saved > 0

    @property
    def has_joined(self) -> bool:
        """True if this attempt has joined a group of its job."""
        return self.attempt.member.joined_round >= 0

    @property
    def is_down(self) -> bool:
        """True if the rank has work and no process."""
        return self.in_service and not self.is_alive and not self.finished

    @property
    def is_well(self) -> bool:
        """True if the attempt has given a sign of life, or the rank has no work left."""
        return self.finished or self.attempt.process in _WELL
