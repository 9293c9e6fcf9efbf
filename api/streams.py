"""Live streams: one feed for all clients that follow the same, and a cache of job states.

Any number of streams and long polls of one job cost one query every tenth of a second, and what
they are sent is read and encoded once. What `api.watch` sends is a feed, too.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import structlog
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from sse_starlette import ServerSentEvent

from database.errors import DatabaseUnavailable
from database.records import Job, RankRecord
from muster.contracts.job.status import JobId
from muster.contracts.rank import ProcessState
from muster.contracts.settings.paths import LogName
from muster.logs.follower import JobFollower
from muster.logs.local import LocalLogs
from muster.logs.source import IsOver, Lines, Position, format_event_id

POLL_SECONDS: Final = 0.1
"""How often logs are read; adds this much delay to a line."""

FRESH_SECONDS: Final = 0.1
"""How old a cached job state may be; adds this much delay to the end of a stream."""

FORGET_SECONDS: Final = 60.0
"""A job state that was not read for this long is dropped."""

IDLE_SECONDS: Final = 10.0
"""A stream without events wakes up this often, so that its caller's token can be checked."""

BACKLOG_EVENTS: Final = 32
"""How many of its last events a feed of logs keeps, each of about 64 KiB of lines."""

_LOG: Final = structlog.get_logger("api")

Entry = TypeVar("Entry")
AnyFeed = TypeVar("AnyFeed", bound="Feed[Any]")


@dataclass(eq=False, kw_only=True)
class Feed(ABC, Generic[Entry]):
    """Polls for all who read it, and keeps the last entries that it has found.

    A reader that falls behind what is kept begins again with the whole. So a slow reader costs the
    others nothing, and has no gap.
    """

    is_closing: Callable[[], bool]
    polling: asyncio.Task[None] = field(init=False)
    kept: deque[Entry] = field(init=False)
    count: int = field(default=0, init=False)  # of all entries that there were
    readers: int = field(default=0, init=False)
    is_over: bool = field(default=False, init=False)
    failure: Exception | None = field(default=None, init=False)
    opened: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once readers may begin."""
    _moved: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @abstractmethod
    async def poll(self) -> float:
        """Read once and publish what is new; return in how many seconds to read again.

        Sets `is_over` when nothing will change any more.
        """

    def publish(self, entry: Entry) -> None:
        self.kept.append(entry)
        self.count += 1
        self._wake_readers()

    async def after(self, number: int) -> AsyncIterator[Entry | None]:
        """Yield the entries from `number` on, and None at least every `IDLE_SECONDS` without one.

        Ends when nothing comes any more, and when the reader has fallen behind what is kept.
        """
        while number >= self.count - len(self.kept):
            if number < self.count:
                number += 1
                yield self.kept[number - 1 - self.count]
            elif self.is_over:
                return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_SECONDS):
                        await self._moved.wait()
                yield None

    async def run(self) -> None:
        """Poll until nothing changes any more, or the service stops."""
        try:
            while not self.is_closing():
                pause_seconds = await self.poll()
                if self.is_over:
                    return
                await asyncio.sleep(pause_seconds)
        except Exception as error:  # noqa: BLE001  of this thing alone
            self.failure = error  # clients connect again
            _LOG.exception("cannot follow jobs any more", action="watch_failed")
        finally:
            self.is_over = True
            self.opened.set()
            self._wake_readers()

    def _wake_readers(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


class Feeds:
    """The feeds of one event loop, by what they poll. None of them polls without a reader."""

    def __init__(self) -> None:
        self._feeds: dict[Hashable, Feed[Any]] = {}

    @asynccontextmanager
    async def reading(self, key: Hashable, make: Callable[[], AnyFeed]) -> AsyncIterator[AnyFeed]:
        """Give a client the feed of `key`, which ends when its last reader leaves."""
        feed = cast(AnyFeed | None, self._feeds.get(key))
        if feed is None or feed.is_over:
            feed = self._feeds[key] = make()
            feed.polling = asyncio.create_task(feed.run())
        feed.readers += 1
        try:
            await feed.opened.wait()
            yield feed
        finally:
            feed.readers -= 1
            if not feed.readers:
                feed.polling.cancel()
                if self._feeds.get(key) is feed:
                    del self._feeds[key]


@dataclass(frozen=True, slots=True)
class JobState:
    """A job and its ranks at one moment."""

    job: Job
    ranks: Sequence[RankRecord]


def finished_logs(state: JobState | None) -> IsOver:
    """Return which logs will not grow any more; all of them if the job is deleted or over."""
    if state is None or state.job.is_terminal:
        return lambda _name: True
    latest = {record.rank: record for record in state.ranks}

    def is_over(name: LogName) -> bool:
        record = latest.get(name.rank)
        if record is None or name.attempt > record.attempt:
            return False
        return name.attempt < record.attempt or record.state == ProcessState.EXITED

    return is_over


class JobCache:
    """The latest known states of the jobs that clients watch. For one event loop."""

    def __init__(
        self,
        read: Callable[[JobId], JobState | None],
        monotonic: Callable[[], float],
        changes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`changes` differs after any commit; None if that is not known."""
        self._read = read
        self._monotonic = monotonic
        self._changes = changes
        self._states: dict[JobId, tuple[float, int | None, JobState | None]] = {}
        """With the time at which the query began, and what `changes` returned then."""
        self._locks: WeakValueDictionary[JobId, asyncio.Lock] = WeakValueDictionary()

    async def get(self, job_id: JobId, *, is_current: bool = False) -> JobState | None:
        """Return the job as it was at most `FRESH_SECONDS` ago, or None if it does not exist.

        If commits are noticed, the job is read only after one. Returns the last known state while
        the database is unavailable; raises `DatabaseUnavailable` if there is none. With
        `is_current` the job is read now, as its id may belong to another job than a moment ago.
        """
        not_before = self._monotonic() - (0.0 if is_current else FRESH_SECONDS)
        lock = self._locks.setdefault(job_id, asyncio.Lock())
        async with lock:  # all who wait for one query share the next
            known = self._states.get(job_id)
            changes = self._changes()
            if known is not None:
                is_unchanged = changes is not None and changes == known[1] and not is_current
                if is_unchanged or known[0] > not_before:
                    return known[2]
            began = self._monotonic()
            try:
                state = await run_sync(self._read, job_id)
            except DatabaseUnavailable:
                if known is not None and not is_current:
                    return known[2]
                raise
            self._states[job_id] = began, changes, state
            oldest = began - FORGET_SECONDS
            for forgotten in [one for one, (at, *_) in self._states.items() if at < oldest]:
                del self._states[forgotten]
            return state


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Encoded log lines, and the position after them."""

    encoded: bytes
    position: Position


@dataclass(eq=False, kw_only=True)
class LogFeed(Feed[LogEvent]):
    """Reads the logs of a job, all ranks or one, for all who follow them.

    It starts at the end of the logs. A reader gets what is before that from the files, then the
    feed's events; one that falls behind reads the files again.
    """

    logs: LocalLogs
    job: Job
    rank: int | None
    jobs: JobCache
    threads: CapacityLimiter
    _reader: JobFollower | None = field(default=None, init=False)
    _position: Position = field(default_factory=dict, init=False)  # after the last event
    _state: JobState | None = field(init=False)

    def __post_init__(self) -> None:
        self.kept = deque(maxlen=BACKLOG_EVENTS)
        self._state = JobState(self.job, ())

    async def final_state(self) -> JobState | None:
        """Return the job's last state, once there is nothing more to read."""
        await asyncio.shield(self.polling)
        if self.failure is not None:
            raise self.failure
        return self._state

    async def events(self, position: Position) -> AsyncIterator[LogEvent | None]:
        """Yield everything after `position`, until the job is over or the service stops.

        Also yields None, at least every `IDLE_SECONDS` without an event.
        """
        while True:
            number, until = self.count, self._position
            reader = self.logs.follow(self.rank, position, until)
            while event := await self._next(reader, lambda _name: True):
                yield event
                if self.is_closing():
                    return
            position = reader.position
            async for event in self.after(number):
                if event is not None:
                    if reader.is_ahead:
                        break
                    # It now has exactly what lies below `until`.
                    position, number = event.position, number + 1
                yield event
            if self.is_over and number == self.count:
                return

    async def poll(self) -> float:
        if self._reader is None:
            self._position = await run_sync(
                self.logs.tail_position, self.rank, 0, limiter=self.threads
            )
            self._reader = self.logs.follow(self.rank, self._position)
            self.opened.set()
        # Before the files are read: a log that is over by now is complete.
        state = await self.jobs.get(self.job.job_id)
        self._state = state if state is not None and state.job.uid == self.job.uid else None
        while event := await self._next(self._reader, finished_logs(self._state)):
            self._position = event.position
            self.publish(event)
            if self.is_closing():
                return POLL_SECONDS
        self.is_over = self._state is None or self._state.job.is_terminal
        return POLL_SECONDS

    async def _next(self, reader: JobFollower, is_over: IsOver) -> LogEvent | None:
        return await run_sync(self._read_event, reader, is_over, limiter=self.threads)

    def _read_event(self, reader: JobFollower, is_over: IsOver) -> LogEvent | None:
        batch = reader.next_batch(is_over)
        if not batch:
            return None
        text, position = "\n".join(map(self._text, batch)), reader.position
        event = ServerSentEvent(text, id=format_event_id(self.job.uid, position), sep="\n")
        return LogEvent(event.encode(), position)

    def _text(self, lines: Lines) -> str:
        if self.rank is not None:
            return lines.text
        prefix = f"[rank {lines.name.rank}] "
        return prefix + lines.text.replace("\n", f"\n{prefix}")
