"""Histories of one job, told line by line, with time that passes only when the story says so."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from coordinator.actions import Action, Announce, KillProcess, Move, Start, Terminate
from coordinator.fold import fold
from coordinator.happenings import (
    AgentDropped,
    AgentJoined,
    AgentLost,
    Condemned,
    Happening,
    Interrupted,
    LeaveAsked,
    PauseAsked,
    Scaled,
    StopAsked,
    Taken,
)
from coordinator.plan import plan, wake_at
from coordinator.snapshot import (
    AgentState,
    Cause,
    JobSnapshot,
    LayoutSnapshot,
    RankSnapshot,
    Verdict,
)
from muster.contracts.job import JobId, JobStatus, JobUid, Reason, StopRequest
from muster.contracts.messages import (
    Beat,
    Disputed,
    Hello,
    Pulse,
    Raised,
    RankExited,
    RankMessage,
    RankSaid,
    RankSpawned,
    Ready,
    Refused,
    Saved,
    Stranded,
    TookUp,
)
from muster.contracts.pool import Pool
from muster.contracts.spec import JobSpec

ROUNDS = 20
"""A plan that is carried out is planned again; one that never comes to rest is a bug."""

HEARTBEAT_SECONDS = 2.0


def queued_job(**spec: object) -> JobSnapshot:
    job = JobSpec(**spec)
    return JobSnapshot(
        job_id=JobId("job"),
        uid=JobUid("uid"),
        spec=job,
        status=JobStatus.QUEUED,
        ranks=tuple(RankSnapshot(rank=rank) for rank in range(job.world_size)),
        wanted_world_size=job.world_size,
        pool=Pool(
            min_workers=job.min_workers,
            max_workers=job.max_workers or job.world_size,
            timeout_seconds=job.heartbeat_timeout,
        ),
    )


def saved(step: int) -> Saved:
    return Saved(
        generation=0, step=step, epoch=0, digest="", consumed=0, consumed_hash=0, epochs=()
    )


def beat(step: int = 0, **new: object) -> Beat:
    said: dict[str, object] = {
        "step": step,
        "total_steps": 100,
        "epoch": 0,
        "shard_idx": 0,
        "line_idx": 16 * step,
        "loss": 0.5,
        "metrics": {},
        "checkpoints_saved": 0,
        "last_checkpoint_step": None,
        "stopping": False,
        "waiting": False,
    }
    return Beat(**{**said, **new})


def exited(  # noqa: PLR0913  whatever a message of an end may tell
    rank: int,
    incarnation: int,
    *,
    code: int | None = None,
    signal: int | None = None,
    lines: Sequence[str] = (),
    out_of_memory: bool = False,
    unstarted: str | None = None,
    error: str | None = None,
) -> RankExited:
    return RankExited(
        rank=rank,
        incarnation=incarnation,
        exit_code=code,
        signal=signal,
        last_lines=tuple(lines),
        out_of_memory=out_of_memory,
        unstarted=unstarted,
        error=error,
    )


@dataclass
class Story:
    """What a coordinator knows of one job, and what time it is."""

    job: JobSnapshot
    now: float = 1000.0
    agent_is_frozen: bool = False
    """Its process and its connection are there, and nothing is heard of it."""
    stopped: set[int] = field(default_factory=set)
    """Ranks that stand still, as their agent sees."""

    @classmethod
    def submitted(cls, **spec: object) -> Self:
        """A job in the queue."""
        return cls(queued_job(**spec))

    @classmethod
    def starting(cls, **spec: object) -> Self:
        """A job whose ranks were all started and have not said anything yet."""
        story = cls.submitted(**spec)
        story.is_admitted()
        story.plans()
        story.agent_joins()
        story.plans()
        return story

    @classmethod
    def running(cls, **spec: object) -> Self:
        """A job whose ranks all beat."""
        story = cls.starting(**spec)
        for rank in story.job.ranks:
            story.says_hello(rank.rank)
        story.plans()
        assert story.job.status is JobStatus.RUNNING
        return story

    @classmethod
    def gathering(cls, **spec: object) -> Self:
        """A synchronous job whose ranks were all started, and are not ready yet."""
        return cls.starting(**{"mode": "synchronous", **spec})

    @classmethod
    def training(cls, **spec: object) -> Self:
        """A synchronous job whose ranks all take steps together."""
        story = cls.gathering(**spec)
        story.settles()
        assert story.job.status is JobStatus.RUNNING
        return story

    def rank(self, number: int) -> RankSnapshot:
        return self.job.ranks[number]

    # What happens

    def hears(self, happening: Happening) -> Self:
        self.job = fold(self.job, happening, self.now)
        return self

    def takes(self, *actions: Action) -> Self:
        for action in actions:
            self.hears(Taken(action=action))
        return self

    def is_admitted(self) -> Self:
        return self.takes(Move(status=JobStatus.STARTING, message=self.job.note))

    def agent_joins(self, generation: int | None = None) -> Self:
        self.agent_is_frozen = False
        return self.hears(AgentJoined(generation=self._generation(generation)))

    def agent_freezes(self) -> Self:
        self.agent_is_frozen = True
        return self

    def agent_thaws(self) -> Self:
        """Let it be heard again; what its ranks have said meanwhile comes after."""
        self.agent_is_frozen = False
        return self.pulses()

    def pulses(self) -> Self:
        stopped = [(rank, self.rank(rank).incarnation) for rank in sorted(self.stopped)]
        return self.hears(Pulse(stopped=tuple(stopped)))

    def agent_drops(self, generation: int | None = None) -> Self:
        return self.hears(AgentDropped(generation=self._generation(generation)))

    def agent_is_lost(self, generation: int | None = None, living: Iterable[int] = ()) -> Self:
        return self.hears(
            AgentLost(
                generation=self._generation(generation),
                message="the agent is gone",
                living=frozenset(living),
            )
        )

    def rank_says(self, rank: int, message: RankMessage, incarnation: int | None = None) -> Self:
        if incarnation is None:
            incarnation = self.rank(rank).incarnation
        return self.hears(RankSaid(rank=rank, incarnation=incarnation, message=message))

    def is_spawned(self, rank: int, pid: int = 4711) -> Self:
        return self.hears(
            RankSpawned(
                rank=rank,
                incarnation=self.rank(rank).incarnation,
                pid=pid,
                start_ticks=99,
                boot_id="boot",
                node="node",
            )
        )

    def says_hello(self, *ranks: int) -> Self:
        for rank in ranks:
            self.is_spawned(rank).rank_says(rank, Hello())
        return self

    def beats(self, rank: int, step: int = 0, **new: object) -> Self:
        return self.rank_says(rank, beat(step, **new))

    def all_beat(self, step: int = 0) -> Self:
        for rank in self.job.ranks:
            if rank.is_alive:
                self.beats(rank.rank, step)
        return self

    def exits(self, rank: int, *, code: int = 0, lines: Sequence[str] = ()) -> Self:
        incarnation = self.rank(rank).incarnation
        return self.hears(exited(rank, incarnation, code=code, lines=lines))

    def dies(self, rank: int, *, signal: int = 9, lines: Sequence[str] = ()) -> Self:
        incarnation = self.rank(rank).incarnation
        return self.hears(exited(rank, incarnation, signal=signal, lines=lines))

    def is_ended(self, rank: int, **end: object) -> Self:
        """Let a process end in whatever way `exited` knows."""
        return self.hears(exited(rank, self.rank(rank).incarnation, **end))

    def fails_in_step(self, rank: int, step: int, message: str = "update() failed") -> Self:
        self.rank_says(rank, Raised(step=step, message=message))
        return self.exits(rank, code=1, lines=[message])

    def comes_back(self, rank: int) -> Self:
        """Let time go by until a rank is there again."""
        self.plans()
        while not self.rank(rank).is_alive:
            self.goes_on(HEARTBEAT_SECONDS)
        return self.says_hello(rank)

    def refuses(self, rank: int, reason: Reason, message: str) -> Self:
        return self.rank_says(rank, Refused(reason=reason, message=message))

    def is_stopped(self, request: StopRequest = StopRequest.GRACEFUL, grace: float = 30.0) -> Self:
        return self.hears(StopAsked(request=request, grace_seconds=grace))

    def is_interrupted(self) -> Self:
        return self.hears(Interrupted())

    def is_condemned(self, message: str = "there is no data") -> Self:
        verdict = Verdict(reason=Reason.INVALID_DATASET, message=message)
        return self.hears(Condemned(verdict=verdict))

    # What happens to a pool

    def is_ready(self, *ranks: int) -> Self:
        for rank in ranks:
            self.says_hello(rank).rank_says(rank, Ready(port=0))
        return self

    def takes_up(self, *ranks: int, step: int = 0, generation: int | None = None) -> Self:
        """Say that the newest layout is in force for these ranks."""
        if generation is None:
            generation = self.job.layout.generation
        for rank in ranks:
            self.rank_says(rank, TookUp(generation=generation, step=step))
        return self

    def all_take_up(self, step: int = 0) -> Self:
        return self.takes_up(*self.job.layout.ranks, step=step)

    def is_stranded(self, *ranks: int) -> Self:
        generation = self.job.layout.generation
        for rank in ranks:
            self.rank_says(rank, Stranded(generation=generation, message="a peer is gone"))
        return self

    def disputes(self, rank: int, *workers: int) -> Self:
        generation = self.job.layout.generation
        said = Disputed(generation=generation, workers=workers, message="other bits")
        return self.rank_says(rank, said)

    def is_scaled(self, world_size: int) -> Self:
        return self.hears(Scaled(world_size=world_size))

    def is_paused(self) -> Self:
        return self.hears(PauseAsked(paused=True))

    def is_resumed(self) -> Self:
        return self.hears(PauseAsked(paused=False))

    def is_to_let_go(self, worker_id: int) -> Self:
        return self.hears(LeaveAsked(worker_id=worker_id))

    def settles(self, step: int = 0) -> list[Action]:
        """Let every rank do its part, in no time, until there is nothing left to do for anybody."""
        done: list[Action] = []
        for _ in range(ROUNDS):
            before = self.job
            self.is_ready(*(rank.rank for rank in before.ranks if rank.is_alive and not rank.ready))
            done += self.plans()
            for rank in self.job.ranks:
                if rank.is_alive:
                    self._does_its_part(rank, step)
            done += self.plans()
            if self.job == before:
                return done
        raise AssertionError("the pool does not come to rest")

    def _does_its_part(self, rank: RankSnapshot, step: int) -> None:
        layout = self.job.layout
        if rank.kill is not None:
            self.dies(rank.rank)
        elif rank.terminated or (rank.took_up >= 0 and rank.worker_id not in layout.workers):
            self.exits(rank.rank)
        elif rank.took_up < layout.generation and rank.worker_id in layout.workers:
            self.takes_up(rank.rank, step=step)

    def passes(self, seconds: float) -> Self:
        """Let time go by in which no rank says anything. Their agent pulses, if it is there."""
        self.now += seconds
        if self.job.agent is not AgentState.CONNECTED or self.agent_is_frozen:
            return self
        # As if it had done so all the while: one pulse after a pause would be another story.
        self.job = replace(self.job, agent_heard_at=self.now)
        return self.pulses()

    def goes_on(self, seconds: float) -> list[Action]:
        """Let time go by in which every living rank beats as it should; return what was done."""
        done: list[Action] = []
        until = self.now + seconds
        while self.now < until:
            self.passes(min(HEARTBEAT_SECONDS, until - self.now)).all_beat()
            done += self.plans()
        return done

    # What is done about it

    def plans(self) -> list[Action]:
        """Carry out what is planned until nothing is left to be done now; return it all."""
        done: list[Action] = []
        for _ in range(ROUNDS):
            actions = plan(self.job, self.now)
            if not actions:
                return done
            self.takes(*actions)
            done += actions
        raise AssertionError(f"the plan does not come to rest: {actions}")

    def wakes(self) -> list[Action]:
        """Let time go by until the plan wants to be asked again; return what is done then."""
        return self.passes(self.patience_seconds).plans()

    @property
    def patience_seconds(self) -> float:
        """How long the plan has to wait, if its agent pulses on and nothing else happens."""
        heard = replace(self.job, agent_heard_at=math.inf)
        return wake_at(heard, self.now) - self.now

    def _generation(self, named: int | None) -> int:
        return self.job.generation if named is None else named


def starts(actions: Sequence[Action]) -> list[int]:
    """Return the ranks that are started."""
    return [action.rank for action in actions if isinstance(action, Start)]


def layouts(actions: Sequence[Action]) -> list[LayoutSnapshot]:
    """Return the layouts that are announced."""
    return [action.layout for action in actions if isinstance(action, Announce)]


def terminations(actions: Sequence[Action]) -> list[int]:
    """Return the ranks that are asked to go."""
    return [action.rank for action in actions if isinstance(action, Terminate)]


def kills(actions: Sequence[Action]) -> dict[int, Cause]:
    """Return the ranks that are killed, and why."""
    return {action.rank: action.cause for action in actions if isinstance(action, KillProcess)}
