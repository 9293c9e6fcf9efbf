"""Live streams: one reader per job for all clients that follow its logs, and a cache of job states.

Any number of streams and long polls of one job cost one query every tenth of a second, and its
logs are read and encoded once.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from sse_starlette import ServerSentEvent

from database.errors import DatabaseUnavailable
from database.records import Job, RankRecord
from muster.contracts.job import JobId, JobUid
from muster.contracts.paths import LogName
from muster.contracts.rank import ProcessState
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
"""How many of its last events a feed keeps, each of about 64 KiB of lines. A reader further behind
reads the files again."""


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


class LogFeed:
    """Reads the logs of a job, all ranks or one, for all who follow them.

    It starts at the end of the logs. A reader gets what is before that from the files, then the
    feed's events; one that falls behind the kept events reads the files again. So a slow reader
    costs the others nothing, and has no gap.
    """

    def __init__(self, broadcast: "LogBroadcast", job: Job, rank: int | None) -> None:
        self._job = job
        self._logs = broadcast.logs_of(job.job_id)
        self._rank = rank
        self._jobs = broadcast.jobs
        self._is_closing = broadcast.is_closing
        self._readers = broadcast.readers
        self._count = 0
        """How many events there were."""
        self._position: Position = {}
        """After the last event."""
        self._kept: deque[LogEvent] = deque(maxlen=BACKLOG_EVENTS)
        self._moved = asyncio.Event()
        self._opened = asyncio.Event()
        self.listeners = 0
        self.is_over = False
        self._reading = asyncio.create_task(self._read_on())

    def close(self) -> None:
        self._reading.cancel()

    async def final_state(self) -> JobState | None:
        """Return the job's last state, once there is nothing more to read."""
        return await asyncio.shield(self._reading)

    async def events(self, position: Position) -> AsyncIterator[LogEvent | None]:
        """Yield everything after `position`, until the job is over or the service stops.

        Also yields None, at least every `IDLE_SECONDS` without an event.
        """
        await self._opened.wait()
        while True:
            number, until = self._count, self._position
            reader = self._logs.follow(self._rank, position, until)
            while event := await self._next(reader, lambda _name: True):
                yield event
                if self._is_closing():
                    return
            position, is_ahead = reader.position, reader.is_ahead
            # Unless the reader is ahead, it now has exactly what lies below `until`.
            while not (is_ahead and number < self._count):
                if number < self._count - len(self._kept):
                    break  # too far behind: read the files again
                if number < self._count:
                    event = self._kept[number - self._count]
                    position, number = event.position, number + 1
                    yield event
                elif self.is_over:
                    return
                else:
                    await self._moved.wait()
                    yield None

    async def _read_on(self) -> JobState | None:
        try:
            self._position = await run_sync(
                self._logs.tail_position, self._rank, 0, limiter=self._readers
            )
            self._opened.set()
            reader = self._logs.follow(self._rank, self._position)
            clock = asyncio.get_running_loop().time
            woken_at = clock()
            while True:
                # Before the files are read: a log that is over by now is complete.
                state = await self._look()
                while event := await self._next(reader, finished_logs(state)):
                    self._publish(event)
                    if self._is_closing():
                        return state
                if state is None or state.job.is_terminal or self._is_closing():
                    return state
                if clock() - woken_at >= IDLE_SECONDS:
                    woken_at = clock()
                    self._wake_readers()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self.is_over = True
            self._opened.set()
            self._moved.set()

    async def _look(self) -> JobState | None:
        state = await self._jobs.get(self._job.job_id)
        return state if state is not None and state.job.uid == self._job.uid else None

    def _publish(self, event: LogEvent) -> None:
        self._kept.append(event)
        self._count += 1
        self._position = event.position
        self._wake_readers()

    def _wake_readers(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _next(self, reader: JobFollower, is_over: IsOver) -> LogEvent | None:
        return await run_sync(self._read_event, reader, is_over, limiter=self._readers)

    def _read_event(self, reader: JobFollower, is_over: IsOver) -> LogEvent | None:
        batch = reader.next_batch(is_over)
        if not batch:
            return None
        text, position = "\n".join(map(self._text, batch)), reader.position
        event = ServerSentEvent(text, id=format_event_id(self._job.uid, position), sep="\n")
        return LogEvent(event.encode(), position)

    def _text(self, lines: Lines) -> str:
        if self._rank is not None:
            return lines.text
        prefix = f"[rank {lines.name.rank}] "
        return prefix + lines.text.replace("\n", f"\n{prefix}")


@dataclass(slots=True, kw_only=True)
class LogBroadcast:
    """The feeds of one event loop: one for each job, or rank of a job, that clients follow."""

    logs_of: Callable[[JobId], LocalLogs]
    jobs: JobCache
    is_closing: Callable[[], bool]
    readers: CapacityLimiter
    _feeds: dict[tuple[JobUid, int | None], LogFeed] = field(init=False, default_factory=dict)

    @asynccontextmanager
    async def subscribe(self, job: Job, rank: int | None) -> AsyncIterator[LogFeed]:
        """Give the feed of a job, all ranks or one; it is closed when its last reader leaves."""
        key = (job.uid, rank)
        feed = self._feeds.get(key)
        if feed is None or feed.is_over:
            feed = self._feeds[key] = LogFeed(self, job, rank)
        feed.listeners += 1
        try:
            yield feed
        finally:
            feed.listeners -= 1
            if not feed.listeners:
                feed.close()
                if self._feeds.get(key) is feed:
                    del self._feeds[key]
