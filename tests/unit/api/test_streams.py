"""Streams share one reader without gaps or repetitions; the job cache shares queries."""

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from anyio import CapacityLimiter

from api import dependencies, streams
from api.access.auth import Unauthorized
from api.dependencies import Reauthenticate, now_and_then
from api.errors import ServiceUnavailable
from api.routes import logs as routes
from api.streams import (
    FRESH_SECONDS,
    Feeds,
    JobCache,
    JobState,
    LogEvent,
    LogFeed,
)
from database.errors import DatabaseUnavailable
from muster.contracts.job import JobId, JobStatus, JobUid
from muster.contracts.paths import DataDir
from muster.logs import follower
from muster.logs.follower import JobFollower
from muster.logs.local import LocalLogs
from muster.logs.source import Position
from tests.support.logs import JobLogs
from tests.unit.api.jobs import JOB

pytestmark = pytest.mark.anyio

OVER = replace(JOB, status=JobStatus.COMPLETED)
STATE = JobState(JOB, ())
OTHER = JobState(replace(JOB, uid=JobUid("another")), ())
ID = JOB.job_id


class World:
    """A job that writes logs, and the feeds of a service."""

    def __init__(self, root: Path) -> None:
        directory = DataDir(root)
        self.job = JOB
        self.is_closing = False
        ticks = itertools.count()
        self.files = directory.job(JOB.job_id)
        self.logs = LocalLogs(self.files)
        self.state: Any = SimpleNamespace(
            feeds=Feeds(),
            logs_of=lambda _id: self.logs,
            job_cache=JobCache(lambda _id: JobState(self.job, ()), lambda: float(next(ticks))),
            is_closing=lambda: self.is_closing,
            log_readers=CapacityLimiter(2),
        )
        self.written = 0

    def subscribe(self, rank: int | None = None) -> AbstractAsyncContextManager[LogFeed]:
        return routes.feed_of(self.state, JOB, rank)

    def write(self, count: int = 1) -> None:
        """Write numbered lines, to two ranks in turn."""
        for _ in range(count):
            JobLogs(self.files).write(self.written % 2, f"{self.written}\n")
            self.written += 1

    async def read(self, position: Position | None = None) -> list[str]:
        """Follow the job to its end."""
        found = []
        async with self.subscribe() as feed:
            async for event in feed.events(position or {}):
                found += lines(event)
        return found

    def check(self, found: list[str]) -> None:
        """Every line must be there once, those of each rank in order."""
        for rank in (0, 1):
            prefix = f"[rank {rank}] "
            numbers = [int(line.removeprefix(prefix)) for line in found if line.startswith(prefix)]
            assert numbers == list(range(rank, self.written, 2))


def lines(event: LogEvent | None) -> list[str]:
    if event is None:
        return []
    text = event.encoded.decode().removesuffix("\n\n")
    return [line.removeprefix("data: ") for line in text.split("\n")[1:]]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(streams, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(follower, "BATCH_BYTES", 100)
    return World(tmp_path)


async def test_readers_that_join_at_any_time_get_each_line_once(world: World) -> None:
    world.write(50)
    readers = []
    for _ in range(10):
        readers.append(asyncio.create_task(world.read()))
        world.write(20)
        await asyncio.sleep(0.003)
    world.job = OVER
    for reader in readers:
        world.check(await reader)


async def test_a_reader_that_falls_behind_has_no_gap(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BACKLOG_EVENTS", 0)
    opened_by: list[asyncio.Task[object] | None] = []

    class Noted(LocalLogs):
        def follow(self, *words: Any, **options: Any) -> JobFollower:  # noqa: ANN401  as it takes them
            opened_by.append(asyncio.current_task())
            return super().follow(*words, **options)

    world.logs = Noted(world.files)

    async def keep_up(found: list[str], has_more: asyncio.Event) -> None:
        async with world.subscribe() as feed:
            async for event in feed.events({}):
                found += lines(event)
                has_more.set()

    async def fall_behind() -> list[str]:
        quick_lines: list[str] = []
        has_more = asyncio.Event()
        quick = asyncio.create_task(keep_up(quick_lines, has_more))
        found = []
        async with world.subscribe() as feed:
            async for event in feed.events({}):
                found += lines(event)
                if world.written < 300:
                    world.write(60)
                    # Once the quick reader has the lines, the feed has dropped their events.
                    while len(quick_lines) < world.written:
                        has_more.clear()
                        await has_more.wait()
                else:
                    world.job = OVER
        await quick
        return found

    world.write(2)
    slow = asyncio.create_task(fall_behind())
    async with asyncio.timeout(30):
        world.check(await slow)
    assert opened_by.count(slow) > 1, "it never fell behind"


async def test_a_feed_keeps_a_bounded_backlog(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BACKLOG_EVENTS", 10)

    async with world.subscribe() as feed:
        reader = asyncio.create_task(world.read())
        for _ in range(40):
            world.write(2)
            await asyncio.sleep(0.003)
        world.job = OVER
        world.check(await reader)
        assert len(feed.kept) == 10


async def test_a_reader_ahead_of_the_feed_gets_nothing_twice(world: World) -> None:
    world.write(2)
    async with world.subscribe() as feed:
        stream = feed.events({})
        assert sorted(lines(await anext(stream))) == ["[rank 0] 0", "[rank 1] 1"]
        # The reader has read on at another service, and reconnects here.
        world.write(2)
        ahead = {rank: (0, world.files.log(rank, 0).stat().st_size) for rank in (0, 1)}
        world.write(2)
        reader = asyncio.create_task(world.read(ahead))
        await asyncio.sleep(0.01)
        world.job = OVER
        assert sorted(await reader) == ["[rank 0] 4", "[rank 1] 5"]


async def test_the_last_reader_closes_the_feed(world: World) -> None:
    async with world.subscribe() as first:
        async with world.subscribe() as second:
            assert first is second
        async with world.subscribe(0) as other:
            assert other is not first
    with pytest.raises(asyncio.CancelledError):
        await first.final_state()
    async with world.subscribe() as again:
        assert again is not first


async def test_a_failed_feed_fails_its_streams(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("disk failure")

    async with world.subscribe() as feed:
        monkeypatch.setattr(streams, "finished_logs", broken)
        async for _ in feed.events({}):
            pass
        with pytest.raises(RuntimeError, match="disk failure"):
            await feed.final_state()


START = b"id: u/0.0:0\nretry: 2000\n\n"


def stream(
    world: World, reauthenticate: Reauthenticate, timeout_seconds: float = 20
) -> list[bytes]:
    """Return what a stream of a job that writes nothing sends; it wakes up at once."""

    async def read() -> list[bytes]:
        events = routes._events(world.state, JOB, None, {}, now_and_then(reauthenticate))  # noqa: SLF001
        return [event async for event in events]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "IDLE_SECONDS", 0.0)
        patch.setattr(dependencies, "IDLE_SECONDS", 0.0)
        return asyncio.run(asyncio.wait_for(read(), timeout_seconds))


def test_a_stream_ends_when_its_token_is_revoked(world: World) -> None:
    answers = [None, ServiceUnavailable("away"), None, Unauthorized("revoked-token", "")]

    async def reauthenticate() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    assert stream(world, reauthenticate) == [START], "there is no end event"
    assert answers == [], "an unavailable database does not end it"


def test_a_stream_with_a_valid_token_goes_on(world: World) -> None:
    async def reauthenticate() -> None: ...

    with pytest.raises(TimeoutError):
        stream(world, reauthenticate, 0.2)


class Rows:
    """A database that counts its queries, and a clock that moves by itself a little."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.queries = 0
        self.answer: Callable[[], JobState | None] = lambda: STATE
        self.changes: int | None = None
        self.cache = JobCache(self._read, self._monotonic, lambda: self.changes)

    def _monotonic(self) -> float:
        self.seconds += 1e-6
        return self.seconds

    def _read(self, _job_id: JobId) -> JobState | None:
        self.queries += 1
        return self.answer()


class SlowAnswer:
    """An answer that waits until it may go on."""

    def __init__(self, state: JobState) -> None:
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        self._state = state

    def __call__(self) -> JobState:
        self.has_begun.set()
        assert self.go_on.wait(20)
        return self._state


def unavailable() -> Any:  # noqa: ANN401  it never returns
    raise DatabaseUnavailable("away")


async def test_fifty_readers_share_one_query() -> None:
    rows = Rows()
    states = await asyncio.gather(*[rows.cache.get(ID) for _ in range(50)])
    assert (states, rows.queries) == ([STATE] * 50, 1)
    rows.seconds += FRESH_SECONDS
    await rows.cache.get(ID)
    assert rows.queries == 2


async def test_an_unchanged_database_is_not_asked_again() -> None:
    rows = Rows()
    for changes, queries in [(1, 1), (1, 1), (2, 2), (None, 3), (None, 4), (2, 5)]:
        rows.changes = changes
        rows.seconds += FRESH_SECONDS
        await rows.cache.get(ID)
        assert rows.queries == queries, changes
    await rows.cache.get(ID, is_current=True)
    assert rows.queries == 6


async def test_a_current_state_is_of_the_job_that_has_the_id_now() -> None:
    rows = Rows()
    await rows.cache.get(ID)
    rows.answer = lambda: OTHER
    assert await rows.cache.get(ID) == STATE, "it is fresh"
    assert await rows.cache.get(ID, is_current=True) == OTHER
    assert await rows.cache.get(ID) == OTHER


async def test_callers_during_a_query_share_the_next_one() -> None:
    rows = Rows()
    rows.answer = slow = SlowAnswer(STATE)
    early = asyncio.create_task(rows.cache.get(ID, is_current=True))
    await asyncio.to_thread(slow.has_begun.wait, 20)
    rows.answer = lambda: OTHER
    late = [asyncio.create_task(rows.cache.get(ID, is_current=True)) for _ in range(50)]
    await asyncio.sleep(0)
    slow.go_on.set()
    assert await early == STATE
    assert await asyncio.gather(*late) == [OTHER] * 50
    assert rows.queries == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_current", [False, True])
def test_a_reader_that_leaves_does_not_disturb_others(*, is_current: bool) -> None:
    faults: list[object] = []

    async def scenario() -> None:
        rows = Rows()
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        rows.answer = slow = SlowAnswer(STATE)
        leaving = asyncio.create_task(rows.cache.get(ID, is_current=is_current))
        staying = asyncio.create_task(rows.cache.get(ID, is_current=is_current))
        await asyncio.to_thread(slow.has_begun.wait, 20)
        leaving.cancel()
        slow.go_on.set()
        assert await staying == STATE

    asyncio.run(scenario())
    gc.collect()
    assert faults == []


async def test_without_a_database_get_returns_the_last_state() -> None:
    rows = Rows()
    await rows.cache.get(ID)
    rows.answer = unavailable
    rows.seconds += FRESH_SECONDS
    assert await rows.cache.get(ID) == STATE
    for refused in (rows.cache.get(ID, is_current=True), rows.cache.get(JobId("unknown"))):
        with pytest.raises(DatabaseUnavailable):
            await refused
