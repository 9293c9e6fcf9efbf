"""Jobs that come meanwhile are stored together, and everybody is told of their own."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from unit.api.jobs import JOB

from api.intake import Intake, Outcomes
from muster.contracts.job import JobId
from store.company import Work
from store.errors import JobExists, StoreError, StoreUnavailable
from store.records import Job

DEADLINE_SECONDS = 20.0


class Store:
    """Stores what it is given, once it is let go."""

    def __init__(self) -> None:
        self.stored: list[list[str]] = []
        self.nudges = 0
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.trouble: BaseException | None = None
        self.intake = Intake(self._store, self._nudge)

    def _store(self, creations: Sequence[Work[Job]]) -> Outcomes:
        self.begun.set()
        assert self.let_go.wait(DEADLINE_SECONDS)
        if isinstance(self.trouble, StoreUnavailable):
            return [self.trouble] * len(creations)
        if self.trouble is not None:
            raise self.trouble
        outcomes = [_outcome(creation) for creation in creations]
        self.stored.append([job.job_id for job in outcomes if isinstance(job, Job)])
        return outcomes

    def _nudge(self) -> None:
        self.nudges += 1

    async def while_one_is_stored(self, *others: Work[Job]) -> list[Job | BaseException]:
        """Let `others` come while the job "first" is being stored; return what each is told."""
        first = asyncio.create_task(self.intake.take_in(creates("first")))
        await asyncio.to_thread(self.begun.wait, DEADLINE_SECONDS)
        coming = [asyncio.create_task(self.intake.take_in(other)) for other in others]
        await asyncio.sleep(0)
        self.let_go.set()
        return await asyncio.gather(first, *coming, return_exceptions=True)


def _outcome(creation: Work[Job]) -> Job | Exception:
    try:
        return creation(None)  # type: ignore[arg-type]  # these need no connection
    except StoreError as refusal:
        return refusal


def creates(name: str) -> Work[Job]:
    return lambda _: replace(JOB, job_id=JobId(name))


def refused(refusal: StoreError) -> Work[Job]:
    def create(_: object) -> Job:
        raise refusal

    return create


def test_those_who_come_meanwhile_are_stored_together_with_one_nudge() -> None:
    store, exists = Store(), JobExists(JobId("b"))
    told = asyncio.run(store.while_one_is_stored(creates("a"), refused(exists), creates("c")))
    assert store.stored == [["first"], ["a", "c"]]
    assert store.nudges == 2
    assert [job.job_id for job in told if isinstance(job, Job)] == ["first", "a", "c"]
    assert told[2] is exists


def test_when_the_store_is_away_whoever_waits_is_told_at_once() -> None:
    store = Store()
    store.trouble = StoreUnavailable("away")
    told = asyncio.run(store.while_one_is_stored(creates("a"), creates("b")))
    assert told == [store.trouble] * 3


def test_who_is_stored_is_told_so_though_the_store_was_away_for_the_first() -> None:
    store, away = Store(), StoreUnavailable("away")
    told = asyncio.run(store.while_one_is_stored(refused(away), creates("b")))
    assert told[1] is away
    assert [job.job_id for job in told if isinstance(job, Job)] == ["first", "b"]


def test_a_fault_leaves_nobody_waiting_and_the_next_is_served() -> None:
    store = Store()
    store.trouble = RuntimeError("a fault of ours")

    async def story() -> None:
        store.let_go.set()
        with pytest.raises(RuntimeError):
            await store.intake.take_in(creates("a"))
        store.trouble = None
        assert (await store.intake.take_in(creates("b"))).job_id == "b"

    asyncio.run(story())


class Ending(BaseException):
    """What ends a service."""


def test_when_the_service_ends_nobody_is_left_waiting() -> None:
    store = Store()
    store.trouble = Ending()

    async def story() -> None:
        told = await store.while_one_is_stored(creates("a"))
        assert [type(each) for each in told] == [asyncio.CancelledError] * 2
        store.trouble = None
        assert (await store.intake.take_in(creates("b"))).job_id == "b"

    asyncio.run(asyncio.wait_for(story(), DEADLINE_SECONDS))


def test_a_client_that_leaves_takes_nobody_along() -> None:
    store = Store()

    async def story() -> None:
        leaving = asyncio.create_task(store.intake.take_in(creates("a")))
        await asyncio.to_thread(store.begun.wait, DEADLINE_SECONDS)
        staying = asyncio.create_task(store.intake.take_in(creates("b")))
        await asyncio.sleep(0)
        leaving.cancel()
        store.let_go.set()
        assert (await staying).job_id == "b"

    asyncio.run(story())
    assert store.stored == [["a"], ["b"]]
