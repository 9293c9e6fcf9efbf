"""The coordinator's loop: what it folds before it judges, and how it ends."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from coordinator import loop as module
from coordinator.decide.actions import AgentSaid, LoopStalled, Observation, StartAgent
from coordinator.decide.state.job import JobSnapshot
from coordinator.decide.state.rank import NEVER
from coordinator.loop import CoordinatorLoop
from coordinator.persistence import Attachment
from coordinator.tracked_job import TrackedJob
from database.errors import DatabaseUnavailable
from database.records import JobWrite
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.status import JobUid
from muster.contracts.messages.agent import AgentClaim, AgentHeartbeat, AgentHello, RankSaid
from muster.contracts.messages.rank import Warned
from muster.contracts.settings.paths import LogName
from muster.contracts.token import sha256_of
from tests.support.stories import Story, beat

DEADLINE_SECONDS = 10.0
"""Only a failing test waits so long."""


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Table:
    """One job, and nothing new about it in the database."""

    job: TrackedJob
    reads: int = 0

    @property
    def tracked(self) -> dict[JobUid, TrackedJob]:
        return {self.job.snapshot.uid: self.job}

    def admitted(self) -> list[TrackedJob]:
        return [self.job]

    async def read_changes(self, _now: object) -> None:
        self.reads += 1

    def admit(self, _now: object) -> None: ...

    async def keep_code(self, _job: TrackedJob) -> None: ...

    def release(self, _job: TrackedJob) -> None: ...


@dataclass
class SlowWriter:
    """A slow database: `meanwhile` happens during each commit."""

    meanwhile: list[Callable[[], None]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def commit(self, writes: list[JobWrite]) -> None:
        while self.meanwhile:
            self.meanwhile.pop()()
        self.events += [event.message for write in writes for event in write.events]

    async def acknowledge(self) -> bool:
        return True


@dataclass
class Lifecycle:
    is_idle: bool = True
    error: Exception | None = None

    def note_starved(self, jobs: object, now: float) -> None: ...

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


class Stage:
    """A loop with one job, and what it works with."""

    def __init__(
        self,
        job: JobSnapshot,
        clock: Callable[[], float] = time.monotonic,
        database_wait_seconds: float = 0.0,
    ) -> None:
        self.job = TrackedJob(snapshot=job, attachment=Attachment(started_at=None))
        self.table = Table(self.job)
        self.writer = SlowWriter()
        self.lifecycle = Lifecycle()
        self.loop = CoordinatorLoop(
            writer=self.writer,
            jobs=self.table,
            lifecycle=self.lifecycle,
            addresses={},
            clock=clock,
            database_wait_seconds=database_wait_seconds,
        )

    def observe(self, observation: Observation) -> None:
        self.loop.observe(self.job.snapshot.uid, observation)

    def run(self, during_commit: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        """Run the loop; `during_commit` is called from the thread of the first commit."""

        async def coordinate() -> None:
            events = asyncio.get_running_loop()
            self.writer.meanwhile.append(lambda: during_commit(events))
            await self.loop.run()

        asyncio.run(asyncio.wait_for(coordinate(), DEADLINE_SECONDS))


@pytest.mark.parametrize(
    ("token", "digest", "is_expected"),
    [
        ("right", sha256_of("right"), True),
        ("wrong", sha256_of("right"), False),
        ("", sha256_of("right"), False),
        ("right", None, False),
    ],
)
def test_an_agent_is_expected_only_with_its_token(
    token: str, digest: str | None, *, is_expected: bool
) -> None:
    stage = Stage(Story.running(world_size=1).job)
    job = stage.job.snapshot
    stage.job.attach(tokens_sha256={LOCAL_HOST: digest} if digest else {})
    hello = AgentHello(job_uid=job.uid, host=LOCAL_HOST, agent_number=1, token=token)
    assert stage.loop.is_expected(hello) == is_expected
    assert not stage.loop.is_expected(replace(hello, agent_number=2))


def test_an_agent_gets_keys_only_for_its_own_number() -> None:
    stage = Stage(Story.running(world_size=1).job)
    stage.job.attach(tokens_sha256={LOCAL_HOST: "digest"})
    known = AgentClaim(job_uid=stage.job.snapshot.uid, host=LOCAL_HOST, agent_number=1)
    assert stage.loop.token_sha256(known) == "digest"
    assert stage.loop.token_sha256(known, is_remote=True) is None, "it is an agent of this host"
    for other in ({"job_uid": "other"}, {"host": "other"}, {"agent_number": 2}):
        assert stage.loop.token_sha256(replace(known, **other)) is None


def test_a_host_sends_only_logs_of_what_it_may_have_run() -> None:
    story = Story.running(world_size=3, hosts=("a", "b", "c"))
    story.dies(2).plans()
    stage = Stage(story.job)
    claim = AgentClaim(job_uid=story.job.uid, host="b", agent_number=1)
    allowed = {
        (rank, attempt)
        for rank in range(5)
        for attempt in range(3)
        if stage.loop.may_send(claim, LogName(rank, attempt))
    }
    assert allowed == {(1, 0), (2, 0)}, "of a rank elsewhere only attempts that have ended"


def test_a_refused_agent_is_an_event_of_its_job() -> None:
    stage = Stage(Story.running(world_size=1).job, Clock())
    stage.loop.on_refused(JobUid("other"), "of an unknown job")
    stage.loop.on_refused(stage.job.snapshot.uid, "upgrade that host")
    stage.run(lambda events: events.call_soon_threadsafe(stage.loop.hand_over))
    assert stage.writer.events == ["upgrade that host"]


def test_heartbeats_during_a_long_commit_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # The disk is slow, the event loop is not stalled.
    monkeypatch.setattr(module, "STALL_SECONDS", 3600.0)
    clock = Clock()
    stage = Stage(Story.running(world_size=1, heartbeat_timeout=10).job, clock)

    def disk_is_slow(events: asyncio.AbstractEventLoop) -> None:
        clock.now += 11
        said = RankSaid(rank=0, attempt=0, message=beat(step=3))
        for observation in (said, AgentSaid(host=LOCAL_HOST, message=AgentHeartbeat(stopped=()))):
            events.call_soon_threadsafe(stage.observe, observation)
        events.call_soon_threadsafe(stage.loop.hand_over)

    stage.run(disk_is_slow)
    assert stage.job.snapshot.ranks[0].progress.step == 3
    assert stage.job.snapshot.ranks[0].attempt.intent.kill is None


def test_a_stalled_loop_blames_no_rank() -> None:
    clock = Clock()
    stage = Stage(Story.running(world_size=1, heartbeat_timeout=10).job, clock)

    def is_stopped(events: asyncio.AbstractEventLoop) -> None:
        clock.now += 60
        events.call_soon_threadsafe(stage.loop.hand_over)

    stage.run(is_stopped)
    assert stage.job.snapshot.ranks[0].attempt.intent.kill is None
    assert stage.job.decided == []


def test_a_failed_cleanup_ends_the_coordinator() -> None:
    stage = Stage(Story.running(world_size=1).job)
    stage.lifecycle.error = OSError(24, "Too many open files")
    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(asyncio.wait_for(stage.loop.run(), DEADLINE_SECONDS))
    assert stage.writer.events == []


@pytest.mark.slow
def test_nothing_is_decided_while_the_database_is_away() -> None:
    stage = Stage(Story.submitted(world_size=1).is_admitted().job)
    failures = 0

    def database_is_away(events: asyncio.AbstractEventLoop) -> None:
        nonlocal failures
        failures += 1
        stage.job.plan_at = NEVER  # a deadline passes meanwhile
        if failures == 2:
            stage.loop.hand_over()
        stage.writer.meanwhile.append(lambda: database_is_away(events))
        raise DatabaseUnavailable("away")

    stage.run(database_is_away)
    assert stage.table.reads < 100
    assert stage.job.decided == [StartAgent(host=LOCAL_HOST)]


@pytest.mark.parametrize(("wait_seconds", "written"), [(600.0, [2, 1, 0]), (0.0, [])])
def test_the_last_events_wait_for_the_database(
    monkeypatch: pytest.MonkeyPatch, wait_seconds: float, written: list[int]
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    stage = Stage(Story.running(world_size=1).job, database_wait_seconds=wait_seconds)
    attempts = 3

    def is_away() -> None:
        nonlocal attempts
        attempts -= 1
        warning = Warned(message=f"{attempts} to go")
        stage.observe(RankSaid(rank=0, attempt=0, message=warning))
        if attempts:
            stage.writer.meanwhile.append(is_away)
        raise DatabaseUnavailable("away")

    stage.writer.meanwhile.append(is_away)
    stage.loop.hand_over()
    asyncio.run(asyncio.wait_for(stage.loop.run(), DEADLINE_SECONDS))
    assert stage.writer.events == [f"rank 0: {left} to go" for left in written]


def test_heartbeats_alone_do_not_wake_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 3600.0)
    stage = Stage(Story.running(world_size=1, heartbeat_timeout=3600).job, Clock())

    async def coordinate() -> None:
        running = asyncio.ensure_future(stage.loop.run())
        await looked(stage, 1)
        stage.observe(RankSaid(rank=0, attempt=0, message=beat(step=3)))
        stage.observe(AgentSaid(host=LOCAL_HOST, message=AgentHeartbeat(stopped=())))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert stage.table.reads == 1
        stage.observe(RankSaid(rank=0, attempt=0, message=beat(3, stopping=True)))
        await looked(stage, 2)
        assert stage.job.snapshot.ranks[0].progress.step == 3
        stage.loop.hand_over()
        await running

    asyncio.run(coordinate())


def test_only_wake_ups_rest_after_a_long_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 3600.0)
    clock = Clock()
    stage = Stage(Story.running(world_size=1, heartbeat_timeout=10_000).job, clock)

    def takes_long() -> None:
        clock.now += 100

    async def coordinate() -> None:
        stage.writer.meanwhile.append(takes_long)
        running = asyncio.create_task(stage.loop.run())
        stage.loop.wake_soon()
        await looked(stage, 1)
        await asyncio.sleep(0.1)  # until it waits again
        rounds = stage.table.reads
        stage.loop.wake_soon()
        await asyncio.sleep(0.1)
        stage.observe(AgentSaid(host=LOCAL_HOST, message=AgentHeartbeat(stopped=())))
        assert stage.table.reads == rounds
        stage.observe(LoopStalled(seconds=0.0))
        await looked(stage, rounds + 1)
        stage.loop.hand_over()
        await running

    asyncio.run(coordinate())


async def looked(stage: Stage, times: int) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while stage.table.reads < times:  # noqa: ASYNC110  it only counts
            await asyncio.sleep(0.001)
