"""What the coordinator knows of one job: the immutable value that `fold` makes and `plan` reads.

Times are seconds on the coordinator's monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from muster.checkpoints.manifest import RestorePoint
from muster.contracts import agent as agents
from muster.contracts.agent import LOCAL_HOST, UNPLACED, AgentState
from muster.contracts.job import JobId, JobStatus, JobUid, Reason, StopRequest
from muster.contracts.messages import Raised, Ready
from muster.contracts.pool import Pool
from muster.contracts.rank import (
    NO_PROGRESS,
    ProcessRecord,
    ProcessState,
    RankProgress,
)
from muster.contracts.retry import DEFAULT_BACKOFF, RETRIES, Backoff, RetryClass
from muster.contracts.spec import JobSpec

NEVER: Final = float("-inf")

SUSPECT_SHARE: Final = 0.5
"""Share of the heartbeat timeout after which a rank without a heartbeat becomes a suspect."""

AGENT_FRESHNESS_SHARE: Final = 0.25
"""Share of the heartbeat timeout for which one agent pulse proves that the agent hears its ranks.

Longer than the pause between two pulses, and short enough that one more missed heartbeat does not
yet make a rank a suspect.
"""

AGENT_FAILURES_LIMIT: Final = 10
"""Agents lost in a row before any rank came alive: this machine cannot run the job."""

_NO_POOL = Pool(min_workers=1, max_workers=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSnapshot:
    """The present or last agent of one host."""

    host: str
    is_local: bool = True  # of the coordinator's own host, whose processes it sees itself
    state: AgentState = AgentState.ABSENT
    generation: int = 0  # its number; the agents of a host count up
    since: float = NEVER
    """When it entered this state, or was last killed for staying in it."""
    heard_at: float = NEVER
    """When the last heartbeat came, or when it was started or inherited if that was later."""
    is_inherited: bool = False  # the previous coordinator left it, or its ranks
    failures: int = 0  # agents lost in a row before a rank came alive
    start_at: float = NEVER  # earliest start of the next agent
    listing_since: float = NEVER  # since when it lists what the ranks of a gang have saved
    draining_since: float = NEVER
    """Since when its host was asked to send the last logs of ranks that have ended."""
    is_drained: bool = False  # they are at home

    @property
    def is_connected(self) -> bool:
        return self.state is AgentState.CONNECTED

    @property
    def is_wanted(self) -> bool:
        """True if it exists or is being started, and was not dismissed."""
        return self.state not in {AgentState.ABSENT, AgentState.LEAVING}

    @property
    def is_listing(self) -> bool:
        """True if it lists what the ranks of a gang have saved."""
        return self.listing_since != NEVER

    @property
    def is_draining(self) -> bool:
        """True if its host sends the last logs."""
        return self.draining_since != NEVER and not self.is_drained

    def move(self, target: AgentState, now: float) -> "AgentSnapshot":
        """Return the agent in another state, or again in the same one, since `now`."""
        return replace(self, state=agents.move(self.state, target), since=now)


ONE_HOST: Final[Mapping[str, AgentSnapshot]] = {LOCAL_HOST: AgentSnapshot(host=LOCAL_HOST)}
"""The agents of a job that runs where its coordinator does, before the first one is started."""

_NO_AGENT: Final = AgentSnapshot(host=UNPLACED)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """Why a job cannot go on; its ranks save and exit, then its status is FAILED."""

    reason: Reason
    message: str
    exit_code: int | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """The workers that train together, as last published."""

    round: int = 0
    workers: tuple[int, ...] = ()
    """Worker ids in ascending order; the index is the position in the group."""
    ranks: tuple[int, ...] = ()  # the rank of each worker
    attempts: tuple[int, ...] = ()  # the attempt of each rank
    paused: bool = False
    save: int = 0  # number of the request for a checkpoint that this round serves; 0: none


@dataclass(frozen=True, slots=True)
class GangRestore:
    """From where an attempt of a gang resumes (`coordinator.decide.gang_restore`)."""

    attempt: int = -1
    point: RestorePoint | None = None  # None: nothing has been saved yet
    message: str | None = None  # about it, for users


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One rank: its present attempt, if any, and its counters."""

    rank: int
    host: str = LOCAL_HOST  # kept until that host is lost; `UNPLACED` before the first
    attempt: int = -1  # number of the present or last attempt; -1 before the first
    process: ProcessState = ProcessState.EXITED
    identity: ProcessRecord | None = None
    beats: bool = False  # the attempt has said hello, so a missing heartbeat means something
    spawned_at: float = NEVER
    heard_at: float = NEVER
    progressed_at: float = NEVER
    stopped_at: float | None = None
    """When the agent first saw the process stopped (SIGSTOP) if it has never sent a heartbeat."""
    live_at: float = NEVER  # when this attempt first gave a sign of life
    terminated: bool = False  # we asked this attempt to save and exit
    terminated_at: float = NEVER
    stopping: bool = False
    """The rank reports that it was asked to stop, by us or by another process."""
    orphaned_by: str | None = None
    """Which of our processes stopped this attempt while it had no coordinator or agent."""
    waiting: bool = False  # the rank reports that it waits for other ranks
    kill: Cause | None = None  # why this attempt was sent SIGKILL, if it was
    killed_at: float = NEVER
    refused: Cause | None = None  # the permanent error that this attempt reported
    raised: Raised | None = None  # the error that the program raised in a step
    ending: AttemptEnd | None = None  # how the last ended attempt ended
    trouble: Cause | None = None  # why the last attempt is gone; None once the next one is alive
    warning: str | None = None  # the attempt's last warning; an agent that reconnects repeats it
    finished: bool = False  # exited with code 0: this rank has no work left
    start_at: float = NEVER  # earliest start of the next attempt
    restarts: int = 0
    failures: int = 0  # failures in a row, for the backoff
    endings: Mapping[RetryClass, int] = field(default_factory=dict)
    """How many attempts ended in each class."""
    fruitless: int = 0
    """Failures in a row without progress that the program may have caused."""
    proven_step: int = -1
    """How far the job had got at the last of those failures; at least 0 if it has ever worked."""
    step_at_start: int | None = None  # the step at which this attempt began; None while unknown
    has_told_step: bool = False
    """This attempt has reported its step; before that, `progress` is of the previous attempt."""
    exit_code: int | None = None
    exit_signal: int | None = None
    progress: RankProgress = NO_PROGRESS
    checkpoints_before: int = 0  # saved by earlier attempts
    checkpoints_saved: int = 0  # saved by this attempt
    throughput_steps_per_sec: float = 0.0
    measured_step: int = 0
    measured_at: float = NEVER  # step and time of the last throughput measurement
    worker_id: int | None = None  # the attempt's worker id in the pool of a synchronous job
    in_service: bool = True
    """The job should have this rank; a rank out of service leaves and is not replaced."""
    ready: Ready | None = None  # the message with which this attempt said that it can join a group
    joined_round: int = -1  # the group round that this attempt has joined
    stepped_round: int = -1  # the group round in which this attempt last reported a new step
    died: bool = False  # the process is gone; what it has started may still run
    peer_lost_round: int = -1  # the group round in which this attempt has lost a peer

    @property
    def is_alive(self) -> bool:
        """True if a process of this rank may exist."""
        return self.process is not ProcessState.EXITED

    @property
    def has_progressed(self) -> bool:
        """True if this attempt has taken a step or saved a checkpoint."""
        has_stepped = self.step_at_start is not None and self.progress.step > self.step_at_start
        return self.checkpoints_saved > 0 or (self.has_told_step and has_stepped)

    @property
    def is_asked_to_stop(self) -> bool:
        """True if one of our processes (coordinator or agent) asked this attempt to stop."""
        return self.terminated or self.orphaned_by is not None

    @property
    def is_down(self) -> bool:
        """True if the rank has work and no process."""
        return self.in_service and not self.is_alive and not self.finished

    @property
    def is_well(self) -> bool:
        """True if the attempt has given a sign of life, or the rank has no work left."""
        return self.finished or self.process in {ProcessState.LIVE, ProcessState.SUSPECT}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """One job."""

    job_id: JobId
    uid: JobUid
    spec: JobSpec
    status: JobStatus
    ranks: tuple[RankSnapshot, ...]
    reason: Reason | None = None
    message: str | None = None
    note: str | None = None
    """Information about a job that goes well, such as which data set was chosen."""
    agents: Mapping[str, AgentSnapshot] = field(default_factory=lambda: ONE_HOST)
    """By host: every host on which the job may have ranks, in the order in which they fill."""
    stop: StopRequest | None = None
    stop_grace_seconds: float = 0.0
    stop_at: float = NEVER  # when this coordinator learned of the stop request or the failure
    interrupting: bool = False
    """The service shuts down: ranks save and exit, the job goes back to the queue."""
    failure: JobFailure | None = None
    pool: Pool = _NO_POOL  # the workers of a synchronous job; empty for any other
    group: GroupSnapshot = GroupSnapshot()
    wanted_world_size: int = 0  # how many ranks should be in service
    pause_requested: bool = False
    checkpoint_requests: int = 0
    """Requests for a checkpoint so far; only the last one can be pending."""
    checkpoint_requests_done: int = 0
    divergent: frozenset[int] = frozenset()  # workers whose state differs from that of the others
    raised: Raised | None = None  # the last error that the program raised in any rank
    raised_by: int | None = None  # the rank that raised it
    restore: GangRestore = GangRestore()
    unusable: frozenset[RestorePoint] = frozenset()  # damaged in the place of some rank
    done: bool = False
    """The last checkpoint of a synchronous job is durable; its ranks only have to exit."""
    backoff: Backoff = DEFAULT_BACKOFF

    def with_rank(self, changed: RankSnapshot) -> "JobSnapshot":
        """Return this job with one rank replaced."""
        ranks = list(self.ranks)
        ranks[changed.rank] = changed
        return replace(self, ranks=tuple(ranks))

    def with_agent(self, changed: AgentSnapshot) -> "JobSnapshot":
        """Return this job with the agent of one host replaced."""
        return replace(self, agents={**self.agents, changed.host: changed})

    def agent_of(self, rank: RankSnapshot) -> AgentSnapshot:
        """Return the agent of the host that a rank runs on, or is to run on."""
        return self.agents.get(rank.host, _NO_AGENT)

    def host_order(self, rank: RankSnapshot) -> int:
        """Return the position of a rank's host in the order in which hosts fill."""
        return [*self.agents, UNPLACED].index(rank.host)

    def ranks_on(self, host: str) -> tuple[RankSnapshot, ...]:
        """Return the ranks that a host has, or is to have."""
        return tuple(rank for rank in self.ranks if rank.host == host)

    def fresh_until(self, agent: AgentSnapshot) -> float:
        """Until when an agent's last heartbeat proves that a silent rank of it is silent itself."""
        return agent.heard_at + AGENT_FRESHNESS_SHARE * self.spec.heartbeat_timeout

    @property
    def is_synchronous(self) -> bool:
        return self.spec.mode == "synchronous"

    @property
    def is_gang(self) -> bool:
        """True if all ranks are started together (restart scope `gang`)."""
        return self.spec.restart_scope == "gang"

    @property
    def is_gang_broken(self) -> bool:
        """True if a gang has lost a rank while other ranks still run."""
        return self.is_gang and self.any_alive and any(rank.is_down for rank in self.ranks)

    @property
    def next_attempt(self) -> int:
        """The number of the next start of a gang, which is one for all its ranks."""
        return 1 + max(rank.attempt for rank in self.ranks)

    @property
    def is_listing(self) -> bool:
        """True if an agent lists what the ranks of a gang have saved."""
        return any(agent.is_listing for agent in self.agents.values())

    @property
    def is_restore_known(self) -> bool:
        """True if it is decided from where the next attempt of a gang resumes."""
        has_nothing = self.next_attempt == 0 and self.spec.resume_from is None
        return has_nothing or self.restore.attempt == self.next_attempt

    def holds_slot(self, rank: RankSnapshot) -> bool:
        """True if a rank runs or may be started; a gang may start its finished ranks again."""
        return rank.is_alive or rank.is_down or self.is_gang

    @property
    def slots(self) -> int:
        """How many ranks hold a slot."""
        return sum(map(self.holds_slot, self.ranks))

    @property
    def step(self) -> int:
        """The furthest step that any rank has reported."""
        return max((rank.progress.step for rank in self.ranks), default=0)

    def is_ready(self, number: int) -> bool:
        """True if the process of a rank can train, or is alive if we do not manage its training."""
        rank = self.ranks[number]
        is_ready = rank.ready is not None or rank.joined_round >= 0
        return is_ready if self.is_synchronous else rank.is_well

    def durable_step(self, rank: RankSnapshot) -> int | None:
        """Return the newest known checkpoint from which `rank` would resume."""
        saving = self.ranks if self.is_synchronous or self.is_gang else (rank,)
        steps = [one.progress.last_checkpoint_step for one in saving]
        return max((step for step in steps if step is not None), default=None)

    def count_endings(self, rank: RankSnapshot, kind: RetryClass) -> int:
        """Return how many attempts of `rank` ended in this class; a gang counts all its ranks'."""
        counted = self.ranks if self.is_gang else (rank,)
        return sum(one.endings.get(kind, 0) for one in counted)

    def count_attempts(self, rank: RankSnapshot) -> int:
        """Return how many attempts of `rank` have ended, without kills until the job has worked."""
        outside = (kind for kind, retry in RETRIES.items() if retry.is_from_outside)
        killed = sum(self.count_endings(rank, kind) for kind in outside)
        return sum(rank.endings.values()) - (killed if rank.proven_step < 0 else 0)

    @property
    def in_service(self) -> tuple[RankSnapshot, ...]:
        """The ranks that the job should have."""
        return tuple(rank for rank in self.ranks if rank.in_service)

    @property
    def is_ending(self) -> bool:
        """True if no new process may be started."""
        asked = self.stop is not None or self.interrupting
        return asked or self.done or self.failure is not None

    @property
    def is_forced(self) -> bool:
        """True if ranks are killed without time to save."""
        return self.stop is StopRequest.FORCED

    @property
    def any_alive(self) -> bool:
        return any(rank.is_alive for rank in self.ranks)

    def needs_agent(self, host: str) -> bool:
        """True if a host has ranks to watch or to start."""
        return any(
            rank.is_alive or (rank.is_down and not self.is_ending) for rank in self.ranks_on(host)
        )

    @property
    def all_finished(self) -> bool:
        return self.done or all(rank.finished for rank in self.ranks)


def unplaced(hosts: Mapping[str, AgentSnapshot], rank: int) -> RankSnapshot:
    """Return a rank that was never started; with several hosts it waits for its place."""
    host = UNPLACED if len(hosts) > 1 else next(iter(hosts))
    return RankSnapshot(rank=rank, host=host)
