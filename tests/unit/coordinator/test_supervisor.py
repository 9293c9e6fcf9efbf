import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from stories import Story, beat

from coordinator import happenings
from coordinator.actions import StartAgent
from coordinator.charge import Charge
from coordinator.happenings import Happening
from coordinator.rows import Attachment
from coordinator.snapshot import NEVER, JobSnapshot
from coordinator.supervisor import Supervisor
from muster.contracts.job import JobUid
from muster.contracts.messages import Pulse, RankSaid
from store.errors import StoreUnavailable

DEADLINE_SECONDS = 10.0
"""Only a failure waits so long."""


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


class Office:
    """The supervisor of one job, and what it works with."""

    def __init__(
        self,
        job: JobSnapshot,
        clock: Callable[[], float] = time.monotonic,
        blind_since: float | None = None,
    ) -> None:
        self.charge = Charge(snapshot=job, attachment=Attachment(started_at=None))
        self.roster = Roster(self.charge)
        self.tenure = Tenure()
        self.supervisor = Supervisor(
            tenure=self.tenure,
            roster=self.roster,
            attendants=SimpleNamespace(
                are_gone=True, blind_since=blind_since, equip=lambda _: None
            ),
            clock=clock,
            patience_seconds=0.0,
        )

    def hear(self, news: Happening) -> None:
        self.supervisor.hear(self.charge.snapshot.uid, news)


def test_beats_that_came_during_a_long_commit_are_heard_before_anyone_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It is the disk that stands still, and not the loop.
    monkeypatch.setattr("coordinator.wakefulness.DROWSY_SECONDS", 3600.0)
    clock = Clock()
    office = Office(Story.running(world_size=1, heartbeat_timeout=10).job, clock)

    async def coordinate() -> None:
        loop = asyncio.get_running_loop()

        def disk_stalls() -> None:
            clock.now += 11
            said = RankSaid(rank=0, incarnation=0, message=beat(step=3))
            for news in (said, Pulse(stopped=())):
                loop.call_soon_threadsafe(office.hear, news)
            loop.call_soon_threadsafe(office.supervisor.leave)

        office.tenure.meanwhile.append(disk_stalls)
        await office.supervisor.run()

    asyncio.run(coordinate())
    assert office.charge.snapshot.ranks[0].step == 3
    assert office.charge.snapshot.ranks[0].kill is None


def test_a_coordinator_that_is_stopped_in_the_midst_of_a_commit_blames_nobody() -> None:
    clock = Clock()
    office = Office(Story.running(world_size=1, heartbeat_timeout=10).job, clock)

    async def coordinate() -> None:
        loop = asyncio.get_running_loop()

        def is_stopped() -> None:
            clock.now += 60
            loop.call_soon_threadsafe(office.supervisor.leave)

        office.tenure.meanwhile.append(is_stopped)
        await office.supervisor.run()

    asyncio.run(coordinate())
    assert office.charge.snapshot.ranks[0].kill is None
    assert office.charge.decided == []


def test_who_is_to_end_does_not_wait_for_ever_to_see_what_agents_have_left() -> None:
    office = Office(Story.submitted(world_size=1).job, blind_since=0.0)
    office.supervisor.drain()
    asyncio.run(asyncio.wait_for(office.supervisor.run(), DEADLINE_SECONDS))


@pytest.mark.slow
def test_while_the_database_is_away_nobody_runs_in_circles() -> None:
    """What is decided already cannot be decided again, however long it is due."""
    office = Office(Story.submitted(world_size=1).is_admitted().job)
    failures = 0

    def database_is_away() -> None:
        nonlocal failures
        failures += 1
        office.charge.look_at = NEVER  # a deadline passes meanwhile
        if failures == 2:
            office.supervisor.leave()
        office.tenure.meanwhile.append(database_is_away)
        raise StoreUnavailable("away")

    office.tenure.meanwhile.append(database_is_away)
    asyncio.run(office.supervisor.run())
    assert office.roster.looks < 100
    assert office.charge.decided == [StartAgent()]


def test_what_calls_for_no_decision_waits_until_something_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.supervisor.POLL_SECONDS", 3600.0)
    office = Office(Story.running(world_size=1, heartbeat_timeout=3600).job, Clock())

    async def looks(count: int) -> None:
        for _ in range(10**6):
            if office.roster.looks == count:
                return
            await asyncio.sleep(0)
        raise AssertionError("it does not look around")

    async def coordinate() -> None:
        serving = asyncio.ensure_future(office.supervisor.run())
        await looks(1)
        office.hear(RankSaid(rank=0, incarnation=0, message=beat(step=3)))
        office.hear(Pulse(stopped=()))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert office.roster.looks == 1
        office.hear(RankSaid(rank=0, incarnation=0, message=beat(3, stopping=True)))
        await looks(2)
        assert office.charge.snapshot.ranks[0].step == 3
        office.supervisor.leave()
        await serving

    asyncio.run(coordinate())


def test_after_a_long_round_a_nudge_waits_and_what_is_heard_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.supervisor.POLL_SECONDS", 3600.0)
    clock = Clock()
    office = Office(Story.running(world_size=1, heartbeat_timeout=10_000).job, clock)

    def a_long_round() -> None:
        clock.now += 100

    async def looked(times: int) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while office.roster.looks < times:  # noqa: ASYNC110  it only counts
                await asyncio.sleep(0.001)

    async def coordinate() -> None:
        office.tenure.meanwhile.append(a_long_round)
        running = asyncio.create_task(office.supervisor.run())
        office.supervisor.nudge()
        await looked(1)
        await asyncio.sleep(0.1)  # until it waits again
        rounds = office.roster.looks
        office.supervisor.nudge()
        await asyncio.sleep(0.1)
        assert office.roster.looks == rounds
        office.hear(Pulse(stopped=()))
        assert office.roster.looks == rounds
        office.hear(happenings.Overslept(seconds=0.0))
        await looked(rounds + 1)
        office.supervisor.leave()
        await running

    asyncio.run(coordinate())
