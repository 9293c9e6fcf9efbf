"""What the coordinator knows of one job: the value that `fold` makes and `plan` reads.

Times are seconds on the coordinator's own monotonic clock. Nothing here is ever changed in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from signal import SIGKILL

from muster.contracts.backoff import DEFAULT_BACKOFF, Backoff
from muster.contracts.endings import RetryClass
from muster.contracts.job import JobId, JobStatus, JobUid, Reason, StopRequest
from muster.contracts.messages import Raised, Ready
from muster.contracts.pool import Pool
from muster.contracts.process import ProcessRecord
from muster.contracts.rank import ProcessState
from muster.contracts.spec import JobSpec

NEVER = float("-inf")

SUSPICION = 0.5
"""Share of the heartbeat timeout after which silence is worth showing."""

VOUCHER = 0.25
"""Share of it for which an agent is believed to hear its ranks after each pulse: more than from one
pulse to the next, and so little that with one beat more its ranks are not even suspects."""

_NO_POOL = Pool(min_workers=1, max_workers=1, timeout_seconds=1.0)


class AgentState(StrEnum):
    """Where the job's agent is."""

    ABSENT = "absent"
    """There is none; one is started when there is work."""
    STARTING = "starting"
    """It was started and has not said hello."""
    CONNECTED = "connected"
    """It takes commands."""
    UNREACHABLE = "unreachable"
    """Its process lives but its connection broke; it comes back by itself."""
    LEAVING = "leaving"
    """It was not heard when it was dismissed: it is told if it comes, and is waited for."""


AGENT_FAILURES_LIMIT = 10
"""Agents lost in a row, none of whose ranks came alive: this machine cannot run the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision that a job cannot go on; its ranks save and exit, then it has failed."""

    reason: Reason
    message: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a process was or is to be ended: for machines, and as a verb phrase for people."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an incarnation ended: what follows from it, and why, as a verb phrase for people."""

    retry_class: RetryClass
    reason: Reason | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSnapshot:
    """Who trains together, as it was last announced."""

    generation: int = 0
    workers: tuple[int, ...] = ()
    """Worker ids in ascending order: a worker's place in the group is its place here."""
    ranks: tuple[int, ...] = ()
    """The rank of each."""
    incarnations: tuple[int, ...] = ()
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One rank: its present process, if any, and everything counted about it."""

    rank: int
    incarnation: int = -1
    """Of the present or last process; -1: none was ever started."""
    process: ProcessState = ProcessState.EXITED
    identity: ProcessRecord | None = None
    beats: bool = False
    """It has said hello, so silence means something."""
    spawned_at: float = NEVER
    heard_at: float = NEVER
    progressed_at: float = NEVER
    stopped_at: float | None = None
    """Since when its agent has seen it stand still (SIGSTOP) that has never heard it beat."""
    live_at: float = NEVER
    """When this incarnation first gave a sign of life."""
    terminated: bool = False
    """We asked this incarnation to save and exit."""
    terminated_at: float = NEVER
    stopping: bool = False
    """It says that it was asked to, by us or by somebody else."""
    orphaned_by: str | None = None
    """Who of us asked this incarnation to stop while nobody looked after it, if anybody did."""
    waiting: bool = False
    """It says that it waits for other ranks."""
    kill: Cause | None = None
    """SIGKILL was sent to this incarnation, and why."""
    killed_at: float = NEVER
    refused: Cause | None = None
    """What this incarnation said that starting it again would not help against."""
    raised: Raised | None = None
    """The error that its program raised in a step."""
    ending: Ending | None = None
    """How the last incarnation that is gone has ended."""
    trouble: Cause | None = None
    """Why the last incarnation is gone, until the next one is alive."""
    warning: str | None = None
    """The last one of this incarnation; an agent that comes back tells it again."""
    finished: bool = False
    """Exited with code 0: nothing is left to do for this rank."""
    start_at: float = NEVER
    """The next incarnation may start from then on."""
    restarts: int = 0
    failures: int = 0
    """In a row, for the backoff."""
    endings: Mapping[RetryClass, int] = field(default_factory=dict)
    """How often an incarnation of this rank ended in each way."""
    fruitless: int = 0
    """Ends in a row, of those its program may be to blame for, without a new checkpoint."""
    proven_step: int = -1
    """The newest checkpoint that there was at the last of those."""
    step_at_start: int | None = None
    """Where this incarnation began; None while that is not known."""
    has_told_step: bool = False
    """It has said where it is; until then `step` is that of the process before it."""
    exit_code: int | None = None
    exit_signal: int | None = None
    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    shard_idx: int = 0
    line_idx: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoints_before: int = 0
    """Saved by earlier incarnations."""
    checkpoints_saved: int = 0
    """Saved by this incarnation."""
    last_checkpoint_step: int | None = None
    throughput_steps_per_sec: float = 0.0
    measured_step: int = 0
    measured_at: float = NEVER
    """Where and when the throughput was last measured."""
    worker_id: int | None = None
    """Of the present or last incarnation, in the pool of a synchronous job."""
    in_service: bool = True
    """The job is to have this rank; one that is out of service leaves and is not replaced."""
    ready: Ready | None = None
    """What this incarnation said when it could take up a layout."""
    took_up: int = -1
    """The generation of the layout that is in force for it."""
    stranded: int = -1
    """The generation of the layout in which it has lost a peer."""

    @property
    def is_alive(self) -> bool:
        """Whether a process of this rank may exist."""
        return self.process is not ProcessState.EXITED

    @property
    def is_to_blame(self) -> bool:
        """Whether the last end may be the program's own doing: none sends SIGKILL to itself."""
        reason = None if self.ending is None else self.ending.reason
        return self.exit_signal != SIGKILL or reason is not Reason.WORKER_EXITED

    @property
    def is_asked_to_go(self) -> bool:
        """Whether one of us has asked this incarnation to end, its coordinator or whoever else."""
        return self.terminated or self.orphaned_by is not None

    @property
    def is_down(self) -> bool:
        """Whether it has work and no process."""
        return self.in_service and not self.is_alive and not self.finished

    @property
    def is_well(self) -> bool:
        """Whether it has given a sign of life, or has nothing left to do."""
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
    """What a person should know of a job that goes well, such as which data set was chosen."""
    generation: int = 0
    agent: AgentState = AgentState.ABSENT
    agent_since: float = NEVER
    """When it came into this state, or was last killed for staying in it."""
    agent_heard_at: float = NEVER
    """When its last pulse came."""
    agent_failures: int = 0
    """Agents in a row that died or never said hello."""
    agent_start_at: float = NEVER
    """The next agent may start from then on."""
    stop: StopRequest | None = None
    stop_grace_seconds: float = 0.0
    stop_at: float = NEVER
    """When this coordinator first saw the request, or that the job cannot go on."""
    interrupting: bool = False
    """The whole service shuts down: save, end, and go back to the queue."""
    verdict: Verdict | None = None
    pool: Pool = _NO_POOL
    """The workers of a synchronous job; empty for any other."""
    layout: LayoutSnapshot = LayoutSnapshot()
    wanted_world_size: int = 0
    """How many ranks are to be in service."""
    pause_asked: bool = False
    disputed: frozenset[int] = frozenset()
    """Workers that hold other bits than the rest."""
    raised: Raised | None = None
    """The last error that the program raised in any of the ranks."""
    raised_by: int | None = None
    """Which rank's process met it."""
    done: bool = False
    """A synchronous job whose last checkpoint is durable: its ranks have only to exit."""
    backoff: Backoff = DEFAULT_BACKOFF

    def with_rank(self, changed: RankSnapshot) -> "JobSnapshot":
        """Return this job with one of its ranks replaced."""
        ranks = list(self.ranks)
        ranks[changed.rank] = changed
        return replace(self, ranks=tuple(ranks))

    @property
    def agent_vouches_until(self) -> float:
        """Until when it is the ranks who are silent, if nothing is heard, and not their agent."""
        return self.agent_heard_at + VOUCHER * self.spec.heartbeat_timeout

    @property
    def is_synchronous(self) -> bool:
        return self.spec.mode == "synchronous"

    @property
    def is_gang(self) -> bool:
        """Whether its ranks are started together, and none without the others."""
        return self.spec.restart_scope == "gang"

    @property
    def is_broken(self) -> bool:
        """Whether a gang has lost a rank and still has others, who cannot go on without it."""
        return self.is_gang and self.any_alive and any(rank.is_down for rank in self.ranks)

    @property
    def slots(self) -> int:
        """How many ranks run or may be started; those of a gang that are done may be, too."""
        return sum(rank.is_alive or rank.is_down or self.is_gang for rank in self.ranks)

    @property
    def step(self) -> int:
        """The furthest step that any rank has said it has taken."""
        return max((rank.step for rank in self.ranks), default=0)

    def durable_step(self, rank: RankSnapshot) -> int | None:
        """Return the newest checkpoint that `rank` would go on from, as far as it is known."""
        saving = self.ranks if self.is_synchronous or self.is_gang else (rank,)
        steps = [one.last_checkpoint_step for one in saving]
        return max((step for step in steps if step is not None), default=None)

    @property
    def in_service(self) -> tuple[RankSnapshot, ...]:
        """The ranks that the job is to have."""
        return tuple(rank for rank in self.ranks if rank.in_service)

    @property
    def is_ending(self) -> bool:
        """Whether no new process is to be started any more."""
        asked = self.stop is not None or self.interrupting
        return asked or self.done or self.verdict is not None

    @property
    def ends_at_once(self) -> bool:
        """Whether ranks are killed, and not asked to save."""
        return self.stop is StopRequest.FORCED

    @property
    def is_left_to_agents(self) -> bool:
        """Whether ranks that have lost their agent may go on and wait for the next one.

        Those of a job that has failed may, too: they are saving, and have its grace for that.
        """
        return self.agent_failures < AGENT_FAILURES_LIMIT

    @property
    def any_alive(self) -> bool:
        return any(rank.is_alive for rank in self.ranks)

    @property
    def has_agent(self) -> bool:
        """Whether an agent looks after the job, or is about to."""
        return self.agent not in {AgentState.ABSENT, AgentState.LEAVING}

    @property
    def needs_agent(self) -> bool:
        """Whether there are ranks to look after, or to start."""
        missing = not self.is_ending and any(rank.is_down for rank in self.ranks)
        return missing or self.any_alive

    @property
    def all_finished(self) -> bool:
        return self.done or all(rank.finished for rank in self.ranks)
