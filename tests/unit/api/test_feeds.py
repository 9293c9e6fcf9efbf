"""One reader for all who follow: nobody misses anything, and nobody pays for the slow."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from anyio import CapacityLimiter
from unit.api.jobs import JOB

from api import feeds as feeds_module
from api import shelf
from api.feeds import Feeds
from api.glances import Glance, Glances
from api.logs import follow
from api.logs.follow import JobFollower
from api.logs.position import Position
from api.shelf import Event
from muster.contracts.job import JobId, JobStatus
from muster.contracts.layout import DataDirectory, JobFiles

OVER = replace(JOB, status=JobStatus.COMPLETED)


class World:
    """A job that writes, and the feeds of a service that may be closing."""

    def __init__(self, root: Path) -> None:
        directory = DataDirectory(root)
        self.job = JOB
        self.is_closing = False
        self.looks = 0
        ticks = itertools.count()
        self.feeds = Feeds(
            directory,
            Glances(self._read, lambda: float(next(ticks))),
            is_closing=lambda: self.is_closing,
            readers=CapacityLimiter(2),
        )
        self.files = directory.job(JOB.job_id)
        self.files.logs.mkdir(parents=True)
        self.written = 0

    def _read(self, _job_id: JobId) -> Glance | None:
        self.looks += 1
        return Glance(self.job, ())

    def write(self, count: int = 1) -> None:
        """Write so many lines, each its number, in two ranks by turns."""
        for _ in range(count):
            with self.files.log(self.written % 2, 0).open("a") as log:
                log.write(f"{self.written}\n")
            self.written += 1

    async def read(self, position: Position | None = None) -> list[str]:
        """Follow the job to its end."""
        found = []
        async with self.feeds.of(JOB, None) as feed:
            async for event in feed.follow(position or {}):
                found += lines(event)
        return found


def lines(event: Event) -> list[str]:
    text = event.wire.decode().removesuffix("\n\n")
    return [line.removeprefix("data: ") for line in text.split("\n")[1:]]


def numbers(found: list[str], rank: int) -> list[int]:
    prefix = f"[rank {rank}] "
    return [int(line.removeprefix(prefix)) for line in found if line.startswith(prefix)]


def check(world: World, found: list[str]) -> None:
    """Every line must be there once, those of each rank in their order."""
    for rank in (0, 1):
        assert numbers(found, rank) == list(range(rank, world.written, 2))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(feeds_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(follow, "BATCH_BYTES", 100)
    return World(tmp_path)


def test_many_who_come_at_any_time_get_every_line_once(world: World) -> None:
    async def story() -> None:
        world.write(50)
        readers = []
        for _ in range(10):
            readers.append(asyncio.create_task(world.read()))
            world.write(20)
            await asyncio.sleep(0.003)
        world.job = OVER
        for reader in readers:
            check(world, await reader)

    asyncio.run(story())


@pytest.mark.parametrize("limit", ["KEPT_EVENTS", "KEPT_BYTES"])
def test_who_is_too_slow_for_the_feed_misses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(shelf, limit, 2)
    opened_by: list[asyncio.Task[object] | None] = []

    class Opened(JobFollower):
        def __init__(
            self,
            files: JobFiles,
            rank: int | None,
            position: Position,
            until: Position | None = None,
        ) -> None:
            super().__init__(files, rank, position, until)
            opened_by.append(asyncio.current_task())

    monkeypatch.setattr(feeds_module, "JobFollower", Opened)

    async def keep_up(heard: list[str], has_heard: asyncio.Event) -> None:
        async with world.feeds.of(JOB, None) as feed:
            async for event in feed.follow({}):
                heard += lines(event)
                has_heard.set()

    async def fall_behind() -> list[str]:
        heard: list[str] = []
        has_heard = asyncio.Event()
        quick = asyncio.create_task(keep_up(heard, has_heard))
        found = []
        async with world.feeds.of(JOB, None) as feed:
            async for event in feed.follow({}):
                found += lines(event)
                if world.written < 300:
                    world.write(60)
                    # The feed has read that, in more events than it keeps, when another has it.
                    while len(heard) < world.written:
                        has_heard.clear()
                        await has_heard.wait()
                else:
                    world.job = OVER
        await quick
        return found

    async def story() -> None:
        slow = asyncio.create_task(fall_behind())
        async with asyncio.timeout(30):
            check(world, await slow)
        assert opened_by.count(slow) > 1, "it never fell behind"

    world.write(2)
    asyncio.run(story())


def test_who_has_more_than_the_feed_gets_nothing_twice(world: World) -> None:
    async def story() -> None:
        async with world.feeds.of(JOB, None) as feed:
            stream = feed.follow({})
            world.write(2)
            assert sorted(lines(await anext(stream))) == ["[rank 0] 0", "[rank 1] 1"]
            # Another service has read on, and its reader comes here.
            world.write(2)
            ahead = {rank: (0, world.files.log(rank, 0).stat().st_size) for rank in (0, 1)}
            world.write(2)
            reader = asyncio.create_task(world.read(ahead))
            await asyncio.sleep(0.01)
            world.job = OVER
            assert sorted(await reader) == ["[rank 0] 4", "[rank 1] 5"]

    asyncio.run(story())


def test_a_service_that_ends_ends_its_streams(world: World) -> None:
    async def story() -> None:
        world.write(2)
        async with world.feeds.of(JOB, None) as feed:
            reading = asyncio.create_task(world.read())
            await asyncio.sleep(0.01)
            world.is_closing = True
            assert len(await reading) == 2
            glance = await feed.end()
            assert glance is not None
            assert not glance.job.is_terminal

    asyncio.run(story())


def test_the_last_who_leaves_closes_the_feed(world: World) -> None:
    async def story() -> None:
        async with world.feeds.of(JOB, None) as first:
            async with world.feeds.of(JOB, None) as second:
                assert first is second
            async with world.feeds.of(JOB, 0) as other:
                assert other is not first
        with pytest.raises(asyncio.CancelledError):
            await first.end()
        async with world.feeds.of(JOB, None) as again:
            assert again is not first

    asyncio.run(story())


def test_what_stops_the_feed_is_told_to_all_who_follow(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the disk says no")

    async def story() -> None:
        async with world.feeds.of(JOB, None) as feed:
            monkeypatch.setattr(feeds_module, "is_over_in", broken)
            async for _ in feed.follow({}):
                pass
            with pytest.raises(RuntimeError, match="the disk says no"):
                await feed.end()

    asyncio.run(story())
