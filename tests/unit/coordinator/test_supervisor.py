import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from stories import Story, beat

from coordinator.actions import StartAgent
from coordinator.charge import Charge
from coordinator.rows import Attachment
from coordinator.snapshot import NEVER
from coordinator.supervisor import Supervisor
from muster.contracts.job import JobUid
from muster.contracts.messages import Pulse, RankSaid
from store.errors import StoreUnavailable


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Roster:
    """One job, and nothing new about it in the database."""

    charge: Charge
    looks: int = 0

    @property
    def charges(self) -> dict[JobUid, Charge]:
        return {self.charge.snapshot.uid: self.charge}

    def admitted(self) -> list[Charge]:
        return [self.charge]

    async def look(self, _now: object) -> None:
        self.looks += 1

    def admit(self, _now: object) -> None: ...

    def release(self, _charge: Charge) -> None: ...


@dataclass
class Tenure:
    """A database that takes its time: `meanwhile` happens during each commit."""

    meanwhile: list[Callable[[], None]] = field(default_factory=list)

    def commit(self, *_rows: object) -> None:
        while self.meanwhile:
            self.meanwhile.pop()()


def test_beats_that_came_during_a_long_commit_are_heard_before_anyone_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    # It is the disk that stands still, and not the loop.
    monkeypatch.setattr("coordinator.wakefulness.DROWSY_SECONDS", 3600.0)
    job = Story.running(world_size=1, heartbeat_timeout=10).job
    charge = Charge(snapshot=job, attachment=Attachment(started_at=None))
    tenure = Tenure()
    attendants = SimpleNamespace(are_gone=True)
    supervisor = Supervisor(
        tenure=tenure, roster=Roster(charge), attendants=attendants, clock=clock
    )

    async def coordinate() -> None:
        loop = asyncio.get_running_loop()

        def disk_stalls() -> None:
            clock.now += 11
            said = RankSaid(rank=0, incarnation=0, message=beat(step=3))
            for news in (said, Pulse(stopped=())):
                loop.call_soon_threadsafe(supervisor.hear, job.uid, news)
            loop.call_soon_threadsafe(supervisor.leave)

        tenure.meanwhile.append(disk_stalls)
        await supervisor.run()

    asyncio.run(coordinate())
    assert charge.snapshot.ranks[0].step == 3
    assert charge.snapshot.ranks[0].kill is None


def test_a_coordinator_that_is_stopped_in_the_midst_of_a_commit_blames_nobody() -> None:
    clock = Clock()
    job = Story.running(world_size=1, heartbeat_timeout=10).job
    charge = Charge(snapshot=job, attachment=Attachment(started_at=None))
    tenure = Tenure()
    attendants = SimpleNamespace(are_gone=True)
    supervisor = Supervisor(
        tenure=tenure, roster=Roster(charge), attendants=attendants, clock=clock
    )

    async def coordinate() -> None:
        loop = asyncio.get_running_loop()

        def is_stopped() -> None:
            clock.now += 60
            loop.call_soon_threadsafe(supervisor.leave)

        tenure.meanwhile.append(is_stopped)
        await supervisor.run()

    asyncio.run(coordinate())
    assert charge.snapshot.ranks[0].kill is None
    assert charge.decided == []


def test_while_the_database_is_away_nobody_runs_in_circles() -> None:
    """What is decided already cannot be decided again, however long it is due."""
    job = Story.submitted(world_size=1).is_admitted().job
    charge = Charge(snapshot=job, attachment=Attachment(started_at=None))
    roster = Roster(charge)
    attendants = SimpleNamespace(are_gone=True, equip=lambda _: None)

    async def coordinate() -> None:
        failures = 0
        supervisor: Supervisor

        def database_is_away() -> None:
            nonlocal failures
            failures += 1
            charge.look_at = NEVER  # a deadline passes meanwhile
            if failures == 2:
                supervisor.leave()
            tenure.meanwhile.append(database_is_away)
            raise StoreUnavailable("away")

        tenure = Tenure([database_is_away])
        supervisor = Supervisor(tenure=tenure, roster=roster, attendants=attendants)
        await supervisor.run()

    asyncio.run(coordinate())
    assert roster.looks < 100
    assert charge.decided == [StartAgent()]


def test_what_calls_for_no_decision_waits_until_something_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.supervisor.POLL_SECONDS", 3600.0)
    job = Story.running(world_size=1, heartbeat_timeout=3600).job
    charge = Charge(snapshot=job, attachment=Attachment(started_at=None))
    roster = Roster(charge)
    supervisor = Supervisor(
        tenure=Tenure(),
        roster=roster,
        attendants=SimpleNamespace(are_gone=True),
        clock=Clock(),
    )

    async def looks(count: int) -> None:
        for _ in range(10**6):
            if roster.looks == count:
                return
            await asyncio.sleep(0)
        raise AssertionError("it does not look around")

    async def coordinate() -> None:
        serving = asyncio.ensure_future(supervisor.run())
        await looks(1)
        supervisor.hear(job.uid, RankSaid(rank=0, incarnation=0, message=beat(step=3)))
        supervisor.hear(job.uid, Pulse(stopped=()))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert roster.looks == 1
        supervisor.hear(job.uid, RankSaid(rank=0, incarnation=0, message=beat(3, stopping=True)))
        await looks(2)
        assert charge.snapshot.ranks[0].step == 3
        supervisor.leave()
        await serving

    asyncio.run(coordinate())
