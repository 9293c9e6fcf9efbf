"""Histories of one job as code; time passes only when the story says so."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec

from coordinator.decide import actions
from coordinator.decide.actions import Action, Observation
from coordinator.decide.fold import fold
from coordinator.decide.placement import place
from coordinator.decide.plan import plan, wake_at
from coordinator.decide.state.job import AgentSnapshot, JobSnapshot, new_rank
from coordinator.decide.state.job_end import JobFailure
from coordinator.decide.state.rank import RankSnapshot
from muster.checkpoints.manifest import CheckpointName
from muster.cluster.description import Cluster, ClusterNode
from muster.contracts.agent import LOCAL_HOST, AgentState
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid, Reason, StopRequest
from muster.contracts.messages import agent as agent_messages
from muster.contracts.messages import rank as rank_messages
from muster.contracts.messages.agent import RankExited
from muster.contracts.messages.logs import LogsDrained
from muster.contracts.messages.rank import Heartbeat, RankMessage, Saved
from muster.contracts.pool import Pool
from muster.contracts.rank import NO_PROGRESS, Phase

ROUNDS = 20
"""Rounds of plan and fold before a plan that never comes to rest counts as a bug."""

HEARTBEAT_SECONDS = 2.0


def queued_job(hosts: Sequence[str] = (LOCAL_HOST,), **spec: object) -> JobSnapshot:
    """Return a job that may use these hosts; the first one is the coordinator's."""
    if len(hosts) > 1:
        spec.setdefault("checkpoint_dir", "s3://bucket/runs")
    job = JobSpec(**spec)
    known = {
        host: AgentSnapshot(host=host, is_local=host == hosts[0], order=order)
        for order, host in enumerate(hosts)
    }
    return JobSnapshot(
        hosts=known,
        agents=known if len(known) == 1 else {},
        job_id=JobId("job"),
        uid=JobUid("uid"),
        spec=job,
        status=JobStatus.QUEUED,
        ranks=tuple(new_rank(known, rank) for rank in range(job.world_size)),
        wanted_world_size=job.world_size,
        pool=Pool(
            min_workers=job.min_workers,
            max_workers=job.max_workers or job.world_size,
        ),
    )


def saved(step: int) -> Saved:
    return Saved(
        generation=0, step=step, epoch=0, digest="", consumed=0, consumed_hash=0, epochs=()
    )


def beat(step: int = 0, **new: object) -> Heartbeat:
    """Return a heartbeat; `new` are fields of it or of its progress."""
    said = {"checkpoints_saved": 0, "stopping": False, "waiting": False, "window": None}
    said["phase"] = Phase.TRAINING
    of_beat = {name: new.pop(name, value) for name, value in said.items()}
    progress = {"step": step, "total_steps": 100, "line_idx": 16 * step, "loss": 0.5, **new}
    return Heartbeat(progress=msgspec.structs.replace(NO_PROGRESS, **progress), **of_beat)


def exited(
    rank: int,
    attempt: int,
    *,
    code: int | None = None,
    signal: int | None = None,
    lines: Sequence[str] = (),
    **more: object,
) -> RankExited:
    how = {"exit_code": code, "signal": signal, "last_lines": tuple(lines), **more}
    return RankExited(rank=rank, attempt=attempt, **how)


@dataclass
class Story:
    """What a coordinator knows of one job, and the time."""

    job: JobSnapshot
    now: float = 1000.0
    frozen: set[str] = field(default_factory=set)
    """Hosts whose agent exists and is connected, but sends nothing."""
    slots: int = 2  # of each host, where there are several
    stopped: set[int] = field(default_factory=set)
    """Ranks that are stopped (SIGSTOP), as their agent sees."""
    saved: dict[int, set[str]] = field(default_factory=dict)
    """The checkpoints of each rank of a gang, which its agent lists on request."""
    inherited: dict[int, set[str]] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)  # ranks whose checkpoints are damaged
    problem: str | None = None  # why they cannot be listed
    can_list: bool = True  # the agent is of this build
    can_send_logs: bool = True  # the hosts have what sends their logs

    def holds(self, rank: int | None = None, step: int | None = None) -> None:
        """The newest checkpoint of a rank is on another machine; None: those of all are here."""
        self.job = replace(self.job, held={} if rank is None else {rank: step})

    @classmethod
    def submitted(cls, **spec: object) -> Self:
        """A job in the queue."""
        return cls(queued_job(**spec))

    @classmethod
    def starting(cls, **spec: object) -> Self:
        """A job whose ranks were all started and have sent nothing yet."""
        story = cls.submitted(**spec)
        story.is_admitted()
        story.plans()
        story.agents_connect()
        story.plans()
        return story

    @classmethod
    def running(cls, **spec: object) -> Self:
        """A job whose ranks all send heartbeats."""
        story = cls.starting(**spec)
        for rank in story.job.ranks:
            story.says_hello(rank.rank)
        story.plans()
        assert story.job.status is JobStatus.RUNNING
        return story

    @classmethod
    def commands(cls, **spec: object) -> Self:
        """A job whose ranks all run a command that sends no heartbeats."""
        story = cls.starting(**{"command": ("python", "train.py"), **spec})
        story.executes(*(rank.rank for rank in story.job.ranks)).plans()
        assert story.job.status is JobStatus.RUNNING
        return story

    @classmethod
    def gang(cls, **spec: object) -> Self:
        """A job of such commands that are restarted together."""
        return cls.commands(**{"restart_scope": "gang", "world_size": 3, **spec})

    @classmethod
    def gathering(cls, **spec: object) -> Self:
        """A synchronous job whose ranks were all started and are not ready yet."""
        return cls.starting(**{"mode": "synchronous", **spec})

    @classmethod
    def training(cls, **spec: object) -> Self:
        """A synchronous job whose ranks all take steps together."""
        story = cls.gathering(**spec)
        story.settles()
        assert story.job.status is JobStatus.RUNNING
        return story

    @classmethod
    def exporting(cls, **spec: object) -> Self:
        """A synchronous job whose ranks have all left the loop; rank 0 exports."""
        story = cls.training(**spec).all_beat(100)
        story.leaves_loop(*(rank.rank for rank in story.job.ranks)).plans()
        return story

    @property
    def agent(self) -> AgentSnapshot:
        """The one of the coordinator's own host."""
        return self.job.agents[LOCAL_HOST]

    def rank(self, number: int) -> RankSnapshot:
        return self.job.ranks[number]

    # What happens

    def observes(self, observation: Observation) -> Self:
        self.job = fold(self.job, observation, self.now)
        return self

    def takes(self, *taken: Action) -> Self:
        for action in taken:
            self.observes(actions.ActionTaken(action=action))
        return self

    def is_admitted(self) -> Self:
        return self.takes(actions.SetStatus(status=JobStatus.STARTING, message=self.job.note))

    def agent_connects(self, agent_number: int | None = None, host: str = LOCAL_HOST) -> Self:
        self.frozen.discard(host)
        number = self._agent_number(agent_number, host)
        return self.observes(actions.AgentConnected(host=host, agent_number=number))

    def agents_connect(self) -> Self:
        """Let the agents that were started connect."""
        for agent in self.job.agents.values():
            if agent.state is AgentState.STARTING:
                self.agent_connects(host=agent.host)
        return self

    def power_fails(self, host: str) -> Self:
        """Let a host go silent: its agent and its ranks send nothing more."""
        return self.agent_freezes(host)

    def is_suspended(self, *ranks: int, attempt: int | None = None) -> Self:
        """Let the processes of exactly these ranks be stopped (SIGSTOP); the agent reports it."""
        if attempt is not None:
            stopped = tuple((rank, attempt) for rank in ranks)
            return self._agent_says(LOCAL_HOST, agent_messages.AgentHeartbeat(stopped=stopped))
        self.stopped = set(ranks)
        return self.pulses()

    def agent_freezes(self, host: str = LOCAL_HOST) -> Self:
        self.frozen.add(host)
        return self

    def agent_thaws(self, host: str = LOCAL_HOST) -> Self:
        """Let it send again; what its ranks have sent meanwhile follows."""
        self.frozen.discard(host)
        return self.pulses(host)

    def starves(self, *ranks: int, seconds: float, late: float = 0.0) -> Self:
        """Let time pass in which these ranks, or else the agent, wait for a processor."""
        self.now += seconds
        if not ranks:
            agent = self.job.agents[LOCAL_HOST]
            starved = {"host": LOCAL_HOST, "agent_number": agent.agent_number}
            so_far = agent.starved_seconds + seconds
            return self.observes(actions.AgentStarved(seconds=so_far, **starved))
        self._see_agent(self.job.agents[LOCAL_HOST], self.now)
        attempts = ((rank, self.rank(rank).attempt) for rank in ranks)
        waited = tuple((rank, it.number, it.starved_seconds + seconds) for rank, it in attempts)
        beat = agent_messages.AgentHeartbeat(stopped=(), late_seconds=late, starved=waited)
        return self._agent_says(LOCAL_HOST, beat)

    def pulses(self, host: str = LOCAL_HOST) -> Self:
        ranks = [self.rank(rank) for rank in sorted(self.stopped)]
        stopped = tuple((rank.rank, rank.attempt.number) for rank in ranks if rank.host == host)
        return self._agent_says(host, agent_messages.AgentHeartbeat(stopped=stopped))

    def _agent_says(
        self, host: str, message: agent_messages.AgentHeartbeat | agent_messages.CheckpointsListed
    ) -> Self:
        return self.observes(actions.AgentSaid(host=host, message=message))

    def agent_disconnects(self, agent_number: int | None = None, host: str = LOCAL_HOST) -> Self:
        number = self._agent_number(agent_number, host)
        return self.observes(actions.AgentDisconnected(host=host, agent_number=number))

    def agent_is_lost(
        self,
        agent_number: int | None = None,
        living: Iterable[int] = (),
        newest: int = 0,
        host: str = LOCAL_HOST,
        kind: type[actions.AgentLost] = actions.AgentLost,
    ) -> Self:
        return self.observes(
            kind(
                host=host,
                agent_number=self._agent_number(agent_number, host),
                message="the agent is gone",
                living=frozenset(living),
                newest=newest,
            )
        )

    def rank_says(self, rank: int, message: RankMessage, attempt: int | None = None) -> Self:
        if attempt is None:
            attempt = self.rank(rank).attempt.number
        return self.observes(agent_messages.RankSaid(rank=rank, attempt=attempt, message=message))

    def is_spawned(self, rank: int, pid: int = 4711) -> Self:
        return self.observes(
            agent_messages.RankSpawned(
                rank=rank,
                attempt=self.rank(rank).attempt.number,
                pid=pid,
                start_ticks=99,
                boot_id="boot",
                node="node",
                pid_namespace=1,
            )
        )

    def says_hello(self, *ranks: int) -> Self:
        for rank in ranks:
            self.is_spawned(rank).rank_says(rank, rank_messages.Hello())
        return self

    def executes(self, *ranks: int) -> Self:
        """Let these ranks run a command that sends no heartbeats."""
        for rank in ranks:
            self.is_spawned(rank).rank_says(rank, rank_messages.Executing())
        return self

    def beats(self, rank: int, step: int = 0, **new: object) -> Self:
        return self.rank_says(rank, beat(step, **new))

    def says_it_exits(self, *ranks: int, step: int = 0, phase: Phase = Phase.EXITING) -> Self:
        """Let processes say that they exit; nothing follows while they do."""
        for rank in ranks:
            self.rank_says(rank, beat(step, phase=phase))
        return self

    def has_finished(self, *ranks: int, step: int = 100) -> Self:
        """Let processes say that they exit after the end of their loop."""
        return self.says_it_exits(*ranks, step=step, phase=Phase.FINISHED)

    def goes_on_with_its_script(self, rank: int) -> Self:
        """Let the process end that has said hello, and not the script that started it."""
        return self.rank_says(rank, rank_messages.JoinedProcessEnded())

    def all_beat(self, step: int = 0) -> Self:
        for rank in self.job.ranks:
            is_silent = rank.is_exiting or rank.attempt.died or rank.host in self.frozen
            if rank.is_alive and not is_silent:
                self.beats(rank.rank, step)
        return self

    def exits(self, rank: int, *, code: int = 0, lines: Sequence[str] = ()) -> Self:
        attempt = self.rank(rank).attempt.number
        return self.observes(exited(rank, attempt, code=code, lines=lines))

    def dies(self, rank: int, *, signal: int = 9, lines: Sequence[str] = ()) -> Self:
        attempt = self.rank(rank).attempt.number
        return self.observes(exited(rank, attempt, signal=signal, lines=lines))

    def loses_process(self, rank: int) -> Self:
        """Let the agent report a death, before it has contained the rank."""
        attempt = self.rank(rank).attempt.number
        return self.observes(agent_messages.RankDied(rank=rank, attempt=attempt))

    def is_ended(self, rank: int, **end: object) -> Self:
        """Let a process end in any way that `exited` knows."""
        return self.observes(exited(rank, self.rank(rank).attempt.number, **end))

    def fails_in_step(
        self, rank: int, step: int, message: str = "update() failed", key: str = ""
    ) -> Self:
        return self.raises(rank, step, message, key).exits(rank, code=1, lines=[message])

    def raises(self, rank: int, step: int, message: str = "update() failed", key: str = "") -> Self:
        return self.rank_says(rank, rank_messages.Raised(step=step, message=message, key=key))

    def is_asked_to_exit(self, rank: int) -> Self:
        return self.takes(actions.Terminate(rank=rank))

    def comes_back(self, rank: int) -> Self:
        """Let time pass until a rank runs again."""
        self.plans()
        while not self.rank(rank).is_alive:
            self.runs_for(HEARTBEAT_SECONDS)
        return self.says_hello(rank)

    def is_orphaned(self, rank: int, by: str = "its agent") -> Self:
        return self.rank_says(rank, rank_messages.Orphaned(by=by))

    def refuses(self, rank: int, reason: Reason, message: str, *, is_of_data: bool = False) -> Self:
        return self.rank_says(
            rank,
            rank_messages.PermanentFailure(reason=reason, message=message, is_of_data=is_of_data),
        )

    def takes_code(self, **files: str) -> Self:
        """Let the job start for the first time, or anew by hand, with these files."""
        return self.observes(actions.CodeTaken(files=files, script="train"))

    def has_code(self, rank: int, **files: str) -> Self:
        return self.rank_says(rank, rank_messages.Code(files=files))

    def is_not_started(self, rank: int, **files: str) -> Self:
        """Let an agent find another script."""
        return self.has_code(rank, **files).is_ended(
            rank, exit_code=None, signal=None, unstarted="its script was changed"
        )

    def is_stopped(self, request: StopRequest = StopRequest.GRACEFUL, grace: float = 30.0) -> Self:
        return self.observes(actions.StopRequested(request=request, grace_seconds=grace))

    def stalls(self, seconds: float) -> Self:
        """Let the coordinator's loop stand still for that long."""
        return self.passes(seconds).observes(actions.LoopStalled(seconds=seconds))

    def is_interrupted(self) -> Self:
        return self.observes(actions.Interrupted())

    def fails_without_data(self, message: str = "there is no data") -> Self:
        failure = JobFailure(reason=Reason.INVALID_DATASET, message=message)
        return self.observes(actions.JobFailed(failure=failure))

    # What happens to the checkpoints of a gang

    def has_saved(self, *ranks: int, step: int, attempt: int = 0) -> Self:
        return self._keep(self.saved, ranks, CheckpointName(attempt, step))

    def forgets(self, *ranks: int, step: int, attempt: int = 0) -> Self:
        for rank in ranks:
            self.saved[rank].remove(str(CheckpointName(attempt, step)))
        return self

    def inherits(self, *ranks: int, step: int, attempt: int = 0) -> Self:
        return self._keep(self.inherited, ranks, CheckpointName(attempt, step))

    def _keep(
        self, places: dict[int, set[str]], ranks: Sequence[int], name: CheckpointName
    ) -> Self:
        for rank in ranks:
            places.setdefault(rank, set()).add(str(name))
        return self

    def has_damage(self, *ranks: int) -> Self:
        self.damaged |= set(ranks)
        return self

    def restore_fails(self, rank: int) -> Self:
        """Let a rank find the checkpoint damaged from which its gang was to go on."""
        point = str(self.job.restore.point)
        self.rank_says(rank, rank_messages.RestoreFailed(restore_from=point, message="bad hash"))
        return self.exits(rank, code=1)

    def store_is(self, state: str) -> Self:
        """Let the store be ``away``, or ``back``."""
        self.problem = "no answer" if state == "away" else None
        return self

    def never_lists(self) -> Self:
        self.can_list = False
        return self

    def lists_again(self) -> Self:
        self.can_list = True
        return self

    def holds_back_logs(self) -> Self:
        self.can_send_logs = False
        return self

    def logs_come(self, host: str) -> Self:
        return self.observes(actions.AgentSaid(host=host, message=LogsDrained()))

    def _lists(self, host: str) -> None:
        def places(saved: dict[int, set[str]]) -> tuple[agent_messages.RankCheckpoints, ...]:
            ranks = (rank.rank for rank in self.job.ranks)
            names = [tuple(sorted(saved.get(rank, ()), reverse=True)) for rank in ranks]
            return tuple(
                agent_messages.RankCheckpoints(
                    **{"damaged" if rank in self.damaged else "intact": held}
                )
                for rank, held in enumerate(names)
            )

        listed = agent_messages.CheckpointsListed(
            attempt=self.job.next_attempt,
            own=places(self.saved),
            inherited=places(self.inherited),
            problem=self.problem,
        )
        self._agent_says(host, listed)

    # What happens to a pool

    def is_ready(self, *ranks: int) -> Self:
        for rank in ranks:
            self.says_hello(rank).rank_says(rank, rank_messages.Ready(port=0))
        return self

    def joins_group(self, *ranks: int, step: int = 0, round_number: int | None = None) -> Self:
        """Let these ranks report that they have joined the present group round."""
        if round_number is None:
            round_number = self.job.group.round
        for rank in ranks:
            self.rank_says(rank, rank_messages.JoinedGroup(round=round_number, step=step))
        return self

    def leaves_loop(self, *ranks: int, exporter: int | None = None) -> Self:
        """Let these ranks report that training is over, and that their script goes on."""
        named = min(self.job.group.ranks) if exporter is None else exporter
        for rank in ranks:
            self.rank_says(rank, rank_messages.LoopEnded(exporter=named))
        return self

    def all_join_group(self, step: int = 0) -> Self:
        return self.joins_group(*self.job.group.ranks, step=step)

    def loses_peer(self, *ranks: int) -> Self:
        """Let these ranks report that they have lost a peer of the present group round."""
        for rank in ranks:
            lost = rank_messages.PeerLost(round=self.job.group.round, message="a peer is gone")
            self.rank_says(rank, lost)
        return self

    def cannot_reach(self, rank: int, peer: int) -> Self:
        """Let a rank report that no connection to another one came about."""
        lost = rank_messages.PeerLost(
            round=self.job.group.round, message="no connection", unreachable=peer
        )
        return self.rank_says(rank, lost)

    def reports_mismatch(self, rank: int, *workers: int, entry: str = "") -> Self:
        entries = (entry,) if entry else ()
        said = rank_messages.StateMismatch(self.job.group.round, workers, "other bits", entries)
        return self.rank_says(rank, said)

    def _is_asked_for(self, **wanted: Any) -> Self:  # noqa: ANN401  fields of `ChangeRequested`
        names = actions.ChangeRequested.__struct_fields__
        known = {name: getattr(self.job, name) for name in names}
        return self.observes(actions.ChangeRequested(**known | wanted))

    def is_scaled(self, world_size: int) -> Self:
        is_smaller = world_size < self.job.wanted_world_size
        hosts = {} if is_smaller else self.job.wanted_hosts
        return self._is_asked_for(wanted_world_size=world_size, wanted_hosts=hosts)

    def is_joined_by(self, host: str) -> Self:
        """Let a host ask for one rank more than it has, or is about to have."""
        there = sum(rank.host == host for rank in self.job.in_service)
        wanted = {**self.job.wanted_hosts}
        wanted[host] = max(there, wanted.get(host, 0)) + 1
        size = self.job.wanted_world_size + 1
        return self._is_asked_for(wanted_world_size=size, wanted_hosts=wanted)

    def is_paused(self) -> Self:
        return self._is_asked_for(pause_requested=True)

    def is_resumed(self) -> Self:
        return self._is_asked_for(pause_requested=False)

    def is_asked_to_save(self) -> Self:
        return self._is_asked_for(checkpoint_requests=self.job.checkpoint_requests + 1)

    def saves(self, rank: int, step: int, generation: int | None = None) -> Self:
        """Let this rank report a durable checkpoint of the present group round."""
        round_ = self.job.group.round if generation is None else generation
        return self.rank_says(rank, msgspec.structs.replace(saved(step), generation=round_))

    def is_asked_to_leave(self, worker_id: int) -> Self:
        return self.observes(actions.LeaveRequested(worker_id=worker_id))

    def settles(self, step: int = 0) -> list[Action]:
        """Let every rank do what is due, in no time, until nothing is due any more."""
        done: list[Action] = []
        for _ in range(ROUNDS):
            before = self.job
            living = [it for it in before.ranks if it.is_alive and it.host not in self.frozen]
            self.is_ready(*(rank.rank for rank in living if not rank.attempt.member.ready))
            done += self.plans()
            for rank in self.job.ranks:
                if rank.is_alive and rank.host not in self.frozen:
                    self._does_its_part(rank, step)
            done += self.plans()
            if self.job == before:
                return done
        raise AssertionError("the pool does not come to rest")

    def _does_its_part(self, rank: RankSnapshot, step: int) -> None:
        group, attempt = self.job.group, rank.attempt
        is_member = attempt.worker_id in group.workers
        if attempt.intent.kill is not None:
            self.dies(rank.rank)
        elif attempt.member.is_past_loop:
            pass  # its script goes on
        elif attempt.intent.terminated_at is not None or (rank.has_joined and not is_member):
            self.exits(rank.rank)
        elif attempt.member.joined_round < group.round and is_member:
            self.joins_group(rank.rank, step=step)

    def passes(self, seconds: float) -> Self:
        """Let time pass in which ranks send nothing. Their agent pulses if it is connected."""
        self.now += seconds
        for agent in self.job.agents.values():
            if agent.is_connected and agent.host not in self.frozen:
                # It has pulsed all the while: one pulse after a pause is another story.
                self._see_agent(agent, self.now).pulses(agent.host)
        return self

    def _see_agent(self, agent: AgentSnapshot, moment: float) -> Self:
        self.job = self.job.with_agent(replace(agent, seen_at=moment))
        return self

    def runs_for(self, seconds: float) -> list[Action]:
        """Let time pass in which every living rank sends heartbeats; return what was done."""
        done: list[Action] = []
        until = self.now + seconds
        while self.now < until:
            self.passes(min(HEARTBEAT_SECONDS, until - self.now)).all_beat()
            done += self.plans()
        return done

    # What the coordinator does

    def plans(self) -> list[Action]:
        """Take planned actions until nothing is due; return all of them."""
        done: list[Action] = []
        for _ in range(ROUNDS):
            planned = list(self._places()) or plan(self.job, self.now)
            if not planned:
                return done
            self.takes(*planned)
            done += planned
            for action in planned:
                if isinstance(action, actions.ListCheckpoints) and self.can_list:
                    self._lists(action.host)
                if isinstance(action, actions.DrainLogs) and self.can_send_logs:
                    self.logs_come(action.host)
        raise AssertionError(f"the plan does not come to rest: {planned}")

    def _places(self) -> Iterator[Action]:
        if not self.job.spans_hosts or self.job.status is JobStatus.QUEUED:
            return
        nodes = (
            ClusterNode(
                name=host,
                host=host,
                transport="local" if agent.is_local else "ssh",
                slots=self.slots,
                max_adapters=2,
            )
            for host, agent in self.job.hosts.items()
        )
        yield from place(self.job, [self.job], Cluster(nodes=tuple(nodes)), {}, self.now)

    def wakes(self) -> list[Action]:
        """Let time pass until the next plan is due; return what is done then."""
        return self.passes(self.wait_seconds).plans()

    @property
    def wait_seconds(self) -> float:
        """How long the next plan may wait if the agent pulses and nothing else happens."""
        seen = self.job
        for agent in seen.agents.values():
            seen = seen.with_agent(replace(agent, seen_at=math.inf))
        return wake_at(seen, self.now) - self.now

    def _agent_number(self, named: int | None, host: str) -> int:
        return self.job.agents[host].agent_number if named is None else named


def starts(done: Sequence[Action]) -> list[int]:
    """Return the ranks that are started."""
    return [action.rank for action in done if isinstance(action, actions.Start)]


def terminations(done: Sequence[Action]) -> list[int]:
    """Return the ranks that are asked to exit."""
    return [action.rank for action in done if isinstance(action, actions.Terminate)]
