"""What the coordinator knows of one job: the immutable value that `fold` makes and `plan` reads.

Times are seconds on the coordinator's monotonic clock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from coordinator.decide.state.job_end import GOING, EndKind, JobEnd, JobFailure
from coordinator.decide.state.rank import (
    NEVER,
    Attempt,
    Cause,
    RankSnapshot,
)
from coordinator.decide.state.request import NOT_ASKED, Request, RequestState
from muster.checkpoints.manifest import RestorePoint
from muster.contracts.agent import TRANSITIONS, UNPLACED, AgentState
from muster.contracts.errors import move
from muster.contracts.job.engine import SCHEDULERS
from muster.contracts.job.retry import DEFAULT_BACKOFF, RETRIES, Backoff, RetryClass
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid, Reason
from muster.contracts.messages.rank import Raised, StateMismatch
from muster.contracts.pool import Pool

AGENT_FRESHNESS_SHARE: Final = 0.25
"""Share of the heartbeat timeout for which one agent pulse proves that the agent reads its ranks.

Longer than the pause between two pulses, and short enough that one more missed heartbeat does not
yet make a rank a suspect.
"""

SILENCE_LIMIT: Final = 30
"""A process that is silent for so many heartbeat timeouts is dead, whatever it has waited for. A
loop in C that keeps the GIL looks like a process that gets no processor."""

AGENT_FAILURES_LIMIT: Final = 10
"""Agents lost in a row before any rank came alive: this machine cannot run the job."""

NO_MISMATCH: Final = StateMismatch(round=0, workers=(), message="")
_NO_POOL = Pool(min_workers=1, max_workers=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSnapshot:
    """The present or last agent of one host."""

    host: str
    name: str = ""  # what people call the host, if not so
    is_local: bool = True  # of the coordinator's own host, whose processes it sees itself
    order: int = 0  # of the host, among those on which a job may have ranks
    state: AgentState = AgentState.ABSENT
    agent_number: int = 0  # the agents of a host count up
    since: float = NEVER
    """When it entered this state, or was last killed for staying in it."""
    seen_at: float = NEVER
    """When the last heartbeat came, or when it was started or inherited if that was later."""
    starved_seconds: float = 0.0  # for which it got no processor since then
    is_inherited: bool = False  # the previous coordinator left it, or its ranks
    failures: int = 0  # agents lost in a row before a rank came alive
    start_at: float = NEVER  # earliest start of the next agent
    trouble: Cause | None = None  # why no agent runs yet, on any host but the coordinator's own
    listing: Request = NOT_ASKED  # to list what the ranks of a gang have saved
    logs: Request = NOT_ASKED  # to its host, for the last logs of ranks that have ended
    is_unfit: bool = False
    """A rank there has found that the host cannot run this job: no other one is started there."""
    has_code: bool = False  # a rank there has trained the code of the job

    @property
    def is_connected(self) -> bool:
        return self.state is AgentState.CONNECTED

    @property
    def is_usable(self) -> bool:
        """True if it can start ranks."""
        return self.is_connected and not self.is_unfit

    @property
    def is_wanted(self) -> bool:
        """True if it exists or is being started, and was not dismissed."""
        return self.state not in {AgentState.ABSENT, AgentState.LEAVING}

    def move(self, target: AgentState, now: float) -> "AgentSnapshot":
        """Return the agent in another state, or again in the same one, since `now`."""
        if target is not self.state:
            move(TRANSITIONS, self.state, target)
        moved = replace(self, state=target, since=now, starved_seconds=0.0)
        if moved.is_wanted:
            return moved
        # They are gone with it; the next agent has its own.
        listing = self.listing.move(RequestState.NONE)
        logs = self.logs.move(RequestState.NONE)
        return replace(moved, listing=listing, logs=logs)


LAST: Final = 1 << 30
"""The order of a host that the cluster file has no more, or of none at all."""

_NO_AGENT: Final = AgentSnapshot(host=UNPLACED, order=LAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """The workers that train together, as last published."""

    round: int = 0
    workers: tuple[int, ...] = ()  # worker ids; the index is the position in the group
    ranks: tuple[int, ...] = ()  # the rank of each worker
    attempts: tuple[int, ...] = ()  # the attempt of each rank
    paused: bool = False
    save: int = 0  # number of the request for a checkpoint that this round serves; 0: none
    exporter: int | None = None  # see `JobEnd`


@dataclass(frozen=True, slots=True)
class Partition:
    """Two hosts whose ranks could not reach each other."""

    hosts: frozenset[str]
    round: int  # the last group round in which that happened
    count: int = 1  # rounds in a row


@dataclass(frozen=True, slots=True)
class GangRestore:
    """From where an attempt of a gang resumes (`coordinator.decide.gang_restore`)."""

    attempt: int = -1
    point: RestorePoint | None = None  # None: nothing has been saved yet
    message: str | None = None  # about it, for users


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCode:
    """The code that all ranks of a job run."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Digests by path: as of its start, or as the first rank had them."""
    edited: Mapping[str, str] = field(default_factory=dict)
    """Earlier digests, of files that were edited before its start and are not known to be used."""
    note: str = ""  # the last report of a change


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
    note: str | None = None  # about a job that goes well, such as which data set was chosen
    hosts: Mapping[str, AgentSnapshot]
    """Every host on which the job may have ranks, with an agent that was never started."""
    agents: Mapping[str, AgentSnapshot]
    """By host: of those on which the job has, or had, ranks."""
    end: JobEnd = GOING
    pool: Pool = _NO_POOL  # the workers of a synchronous job; empty for any other
    group: GroupSnapshot = GroupSnapshot()
    partition: Partition | None = None  # None once a group has come together
    wanted_world_size: int = 0  # how many ranks should be in service
    wanted_hosts: Mapping[str, int] = field(default_factory=dict)
    """By host: how many ranks should be there at least, because it asked to join."""
    pause_requested: bool = False
    checkpoint_requests: int = 0  # made so far; only the last one can be pending
    checkpoint_requests_done: int = 0
    divergent: frozenset[int] = frozenset()  # workers whose state differs from that of the others
    mismatch: StateMismatch = NO_MISMATCH  # the last one
    lost_before: int = 0  # workers that had failed until then for another reason
    raised: Raised | None = None  # the last error that the program raised in any rank
    raised_by: int | None = None  # the rank that raised it
    restore: GangRestore = GangRestore()
    unusable: frozenset[RestorePoint] = frozenset()  # damaged in the place of some rank
    held: Mapping[int, int | None] = field(default_factory=dict)
    """By rank: the step of its newest checkpoint if that is on a machine which led before us; None
    until it was looked for here."""
    code: JobCode = JobCode()
    is_overloaded: bool = False
    """A process got no processor for so long that it would have been taken for dead."""
    backoff: Backoff = DEFAULT_BACKOFF

    def with_rank(self, changed: RankSnapshot) -> "JobSnapshot":
        """Return this job with one rank replaced."""
        ranks = list(self.ranks)
        ranks[changed.rank] = changed
        return replace(self, ranks=tuple(ranks))

    def with_agent(self, changed: AgentSnapshot) -> "JobSnapshot":
        """Return this job with the agent of one host replaced, or with one for a new host."""
        return replace(self, agents={**self.agents, changed.host: changed})

    @property
    def spans_hosts(self) -> bool:
        """True if ranks of the job may be on several hosts."""
        return len(self.hosts) > 1

    @property
    def is_scheduled(self) -> bool:
        """True if a scheduler chooses the machines of its hosts."""
        return self.spec.engine in SCHEDULERS

    def with_attempt(self, rank: RankSnapshot, changed: Attempt) -> "JobSnapshot":
        """Return this job with the attempt of one rank replaced."""
        return self.with_rank(replace(rank, attempt=changed))

    def agent_of(self, rank: RankSnapshot) -> AgentSnapshot:
        """Return the agent of the host that a rank runs on, or is to run on."""
        return self.agents.get(rank.host, _NO_AGENT)

    def has_other_host(self, rank: RankSnapshot) -> bool:
        """Return whether the job may use a host that can run it, beside that of `rank`.

        A scheduler may choose another machine for the same host.
        """
        unfit = {agent.host for agent in self.agents.values() if agent.is_unfit}
        return self.is_scheduled or bool({*(self.spec.hosts or self.hosts)} - unfit - {rank.host})

    def rank_name(self, rank: RankSnapshot) -> str:
        """Return what messages about the failure of a rank call it."""
        where = f" on {self.host_name(rank.host)}" if self.spans_hosts else ""
        return f"rank {rank.rank}{where}"

    def host_name(self, host: str) -> str:
        """Return what messages call a host."""
        agent = self.agents.get(host) or self.hosts.get(host)
        return host if agent is None else agent.name or host

    def agent_name(self, host: str) -> str:
        """Return what messages call the agent of a host."""
        return "the job's agent" + f" on {self.host_name(host)}" * self.spans_hosts

    def ranks_on(self, host: str) -> tuple[RankSnapshot, ...]:
        """Return the ranks that a host has, or is to have."""
        return tuple(rank for rank in self.ranks if rank.host == host)

    def ranks_by_host(self) -> Mapping[str, Sequence[RankSnapshot]]:
        """Return the ranks of every host that has an agent, or had one, in one pass."""
        found: dict[str, list[RankSnapshot]] = {host: [] for host in self.agents}
        for rank in self.ranks:
            found.setdefault(rank.host, []).append(rank)
        return found

    def forgivable(self, starved_seconds: float) -> float:
        """Return how many seconds without a processor do not count as silence."""
        return min(starved_seconds, (SILENCE_LIMIT - 1) * self.spec.heartbeat_timeout)

    def fresh_until(self, agent: AgentSnapshot) -> float:
        """Until when an agent's last heartbeat proves that a silent rank of it is silent itself."""
        return agent.seen_at + AGENT_FRESHNESS_SHARE * self.spec.heartbeat_timeout

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
        return 1 + max(rank.attempt.number for rank in self.ranks)

    @property
    def is_listing(self) -> bool:
        """True if an agent lists what the ranks of a gang have saved."""
        return any(agent.listing.is_open for agent in self.agents.values())

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
        is_ready = rank.attempt.member.ready is not None or rank.has_joined
        return is_ready if self.is_synchronous else rank.is_well

    @property
    def has_joined_group(self) -> bool:
        """True if all members have joined the present group round."""
        members = (self.ranks[number].attempt.member for number in self.group.ranks)
        return all(member.joined_round == self.group.round for member in members)

    def durable_step(self, rank: RankSnapshot) -> int | None:
        """Return the newest known checkpoint from which `rank` would resume."""
        saving = self.ranks if self.is_synchronous or self.is_gang else (rank,)
        steps = [one.progress.last_checkpoint_step for one in saving]
        return max((step for step in steps if step is not None), default=None)

    def is_held(self, rank: RankSnapshot) -> bool:
        """True if `rank` might begin behind a checkpoint that is not on this machine."""
        if self.is_synchronous:  # it gets its state from others, if any live
            return bool(self.held) and not self.any_alive
        return bool(self.held) if self.is_gang else rank.rank in self.held

    def count_endings(self, rank: RankSnapshot, kind: RetryClass) -> int:
        """Return how many attempts of `rank` ended in this class; a gang counts all its ranks'."""
        counted = self.ranks if self.is_gang else (rank,)
        return sum(one.budget.endings.get(kind, 0) for one in counted)

    def count_attempts(self, rank: RankSnapshot) -> int:
        """Return how many attempts of `rank` have ended, without kills until the job has worked."""
        outside = (kind for kind, retry in RETRIES.items() if retry.is_from_outside)
        killed = sum(self.count_endings(rank, kind) for kind in outside)
        return sum(rank.budget.endings.values()) - (killed if rank.budget.proven_step < 0 else 0)

    @property
    def in_service(self) -> tuple[RankSnapshot, ...]:
        """The ranks that the job should have."""
        return tuple(rank for rank in self.ranks if rank.in_service)

    @property
    def is_ending(self) -> bool:
        """True if no new process may be started."""
        return not self.end.is_going

    @property
    def is_past_loop(self) -> bool:
        """True if training is over, and the job waits for the script of one rank."""
        return self.end.exporter is not None

    def is_needed(self, rank: RankSnapshot) -> bool:
        """True if the job waits for this rank; after the loop only for the one that exports."""
        return self.end.exporter in {None, rank.rank}

    @property
    def failure(self) -> JobFailure | None:
        """Why the job cannot go on, if so."""
        return self.end.failure

    def fail(self, failure: JobFailure, now: float) -> "JobSnapshot":
        """Return this job as it fails: the first failure stands, ranks get the grace period."""
        return replace(self, end=self.end.fail(failure, now, self.spec.stop_grace_seconds))

    @property
    def is_done(self) -> bool:
        """True if the last checkpoint of a synchronous job is durable."""
        return self.end.kind is EndKind.DONE

    @property
    def any_alive(self) -> bool:
        return any(rank.is_alive for rank in self.ranks)

    def needs_agent(self, ranks: Iterable[RankSnapshot]) -> bool:
        """True if the host of these ranks has any to watch or to start."""
        if self.is_gang and not (self.is_ending or self.all_finished):
            return any(rank.in_service for rank in ranks)  # finished ones may start again
        return any(rank.is_alive or (rank.is_down and not self.is_ending) for rank in ranks)

    @property
    def all_finished(self) -> bool:
        return self.is_done or all(rank.finished for rank in self.ranks)


def new_rank(hosts: Mapping[str, AgentSnapshot], rank: int) -> RankSnapshot:
    """Return a rank that was never started; with several hosts it waits for its place."""
    host = UNPLACED if len(hosts) > 1 else next(iter(hosts))
    return RankSnapshot(rank=rank, host=host)
