"""Glances are shared, fresh, and survive a store that is away for a while."""

import asyncio
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from unit.api.jobs import JOB

from api.glances import FRESH_SECONDS, Glance, Glances
from muster.contracts.job import JobId, JobUid
from store.errors import StoreUnavailable

ID = JobId("a")
GLANCE = Glance(JOB, ())


def away() -> Any:  # noqa: ANN401  it never returns
    raise StoreUnavailable("away")


class World:
    """A store that counts its readers, and a clock that does as it is told."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.reads = 0
        self.answer: Callable[[], Glance | None] = lambda: GLANCE
        self.glances = Glances(self._read, lambda: self.seconds)

    def _read(self, _job_id: JobId) -> Glance | None:
        self.reads += 1
        return self.answer()


def test_fifty_watchers_cost_one_read() -> None:
    async def story() -> None:
        world = World()
        glances = await asyncio.gather(*[world.glances.look(ID) for _ in range(50)])
        assert glances == [GLANCE] * 50
        assert world.reads == 1
        world.seconds = FRESH_SECONDS
        await world.glances.look(ID)
        assert world.reads == 2

    asyncio.run(story())


def test_who_comes_anew_sees_the_job_that_has_the_id_now_and_so_do_all_after_him() -> None:
    async def story() -> None:
        world = World()
        await world.glances.look(ID)
        another = Glance(replace(JOB, uid=JobUid("another")), ())
        world.answer = lambda: another
        assert await world.glances.look(ID) == GLANCE, "it is fresh"
        assert await world.glances.look_anew(ID) == another
        assert await world.glances.look(ID) == another

    asyncio.run(story())


def test_those_who_come_anew_while_one_is_read_share_the_next_read() -> None:
    async def story() -> None:
        world = World()
        reading, go_on = threading.Event(), threading.Event()

        def slow() -> Glance:
            reading.set()
            assert go_on.wait(20)
            return GLANCE

        world.answer = slow
        early = asyncio.create_task(world.glances.look_anew(ID))
        await asyncio.to_thread(reading.wait, 20)
        another = Glance(replace(JOB, uid=JobUid("another")), ())
        world.answer = lambda: another
        late = [asyncio.create_task(world.glances.look_anew(ID)) for _ in range(50)]
        await asyncio.sleep(0)
        go_on.set()
        assert await early == GLANCE
        assert await asyncio.gather(*late) == [another] * 50
        assert world.reads == 2
        assert await world.glances.look(ID) == another

    asyncio.run(story())


def test_while_the_store_is_away_nobody_is_told_what_is_now() -> None:
    async def story() -> None:
        world = World()
        await world.glances.look(ID)
        world.answer = away
        with pytest.raises(StoreUnavailable):
            await world.glances.look_anew(ID)
        assert await world.glances.look(ID) == GLANCE
        world.answer = lambda: GLANCE
        assert await world.glances.look_anew(ID) == GLANCE

    asyncio.run(story())


def test_a_watcher_that_leaves_does_not_take_the_read_along() -> None:
    async def story() -> None:
        world = World()
        reading = threading.Event()
        go_on = threading.Event()

        def slow() -> Glance:
            reading.set()
            assert go_on.wait(20)
            return GLANCE

        world.answer = slow
        leaving = asyncio.create_task(world.glances.look(ID))
        staying = asyncio.create_task(world.glances.look(ID))
        await asyncio.to_thread(reading.wait)
        leaving.cancel()
        go_on.set()
        assert await staying == GLANCE
        assert world.reads == 1

    asyncio.run(story())


@pytest.mark.parametrize("look", ["look", "look_anew"])
def test_what_goes_wrong_when_all_watchers_have_left_is_no_fault(look: str) -> None:
    faults: list[object] = []

    async def story() -> None:
        world = World()
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        reading, go_on = threading.Event(), threading.Event()

        def away() -> Any:  # noqa: ANN401  it never returns
            reading.set()
            assert go_on.wait(20)
            raise StoreUnavailable("away")

        world.answer = away
        leaving = asyncio.create_task(getattr(world.glances, look)(ID))
        await asyncio.to_thread(reading.wait, 20)
        leaving.cancel()
        go_on.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(story())
    gc.collect()
    assert faults == []


def test_an_absent_job_is_asked_for_again_at_once() -> None:
    async def story() -> None:
        world = World()
        world.answer = lambda: None
        assert await world.glances.look(ID) is None
        world.answer = lambda: GLANCE
        assert await world.glances.look(ID) == GLANCE

    asyncio.run(story())


def test_while_the_store_is_away_the_last_glance_counts() -> None:
    async def story() -> None:
        world = World()
        await world.glances.look(ID)
        world.answer = away
        world.seconds = FRESH_SECONDS
        assert await world.glances.look(ID) == GLANCE
        with pytest.raises(StoreUnavailable):
            await world.glances.look(JobId("unknown"))

    asyncio.run(story())


def test_a_deleted_job_is_seen_to_be_gone() -> None:
    async def story() -> None:
        world = World()
        await world.glances.look(ID)
        world.answer = lambda: None
        world.seconds = FRESH_SECONDS
        assert await world.glances.look(ID) is None
        world.answer = lambda: Glance(replace(JOB, generation=2), ())
        found = await world.glances.look(ID)
        assert found is not None
        assert found.job.generation == 2

    asyncio.run(story())


@pytest.mark.slow
def test_who_has_seen_the_job_does_not_wait_for_a_store_that_does_not_answer() -> None:
    async def story() -> None:
        world = World()
        assert await world.glances.look(ID) == GLANCE
        go_on = threading.Event()
        later = Glance(replace(JOB, message="later"), ())

        def slow() -> Glance:
            assert go_on.wait(20)
            return later

        world.answer = slow
        for _ in range(2):
            world.seconds += FRESH_SECONDS
            assert await world.glances.look(ID) == GLANCE
        assert world.reads == 2, "nobody asks a second time meanwhile"
        world.answer = lambda: later
        go_on.set()
        world.seconds += FRESH_SECONDS
        assert await world.glances.look(ID) == later

    asyncio.run(story())
