"""A coordinator that is told to go writes what it has heard, as soon as there is a database."""

import asyncio
from types import SimpleNamespace

import pytest
from stories import Story

from coordinator import supervisor as module
from coordinator.charge import Charge
from coordinator.rows import Attachment
from coordinator.supervisor import Supervisor
from muster.contracts.messages import RankSaid, Warned
from store.errors import StoreUnavailable
from store.records import JobWrite


class Absent:
    """A database that is away for so many attempts; one more warning comes during each."""

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts
        self.told: list[str] = []
        self.supervisor: Supervisor | None = None

    def commit(self, writes: list[JobWrite]) -> None:
        if self.attempts:
            self.attempts -= 1
            warning = Warned(message=f"{self.attempts} to go")
            self.supervisor.hear("uid", RankSaid(rank=0, incarnation=0, message=warning))
            raise StoreUnavailable("away")
        self.told += [event.message for write in writes for event in write.events]


def left_with(database: Absent, patience_seconds: float = 600.0) -> list[str]:
    """Tell a coordinator to go; return the events it has written and still has."""
    charge = Charge(
        snapshot=Story.running(world_size=1).job, attachment=Attachment(started_at=None)
    )
    roster = SimpleNamespace(charges={"uid": charge}, admitted=lambda: [charge])
    database.supervisor = Supervisor(
        tenure=database,
        roster=roster,
        attendants=SimpleNamespace(are_gone=True),
        patience_seconds=patience_seconds,
    )
    database.supervisor.leave()
    asyncio.run(database.supervisor.run())
    return [event.message for event in charge.events]


def test_it_waits_for_a_database_that_is_away_and_writes_what_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    database = Absent(attempts=3)
    assert left_with(database) == []
    assert database.told == ["rank 0 2 to go", "rank 0 1 to go", "rank 0 0 to go"]


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    database = Absent(attempts=3)
    left_with(database, patience_seconds=0.0)
    assert (database.attempts, database.told) == (2, [])
