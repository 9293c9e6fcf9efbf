"""One reader of a job's logs for all who follow them live.

A feed reads what is written and makes it an event once, however many follow. Whoever comes reads
the files up to where the feed is, and from there on takes its events as they are. A feed keeps only
the last of them, and whoever falls behind reads the files again: so a slow reader costs nobody
anything, and misses nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from api.glances import Glance, Glances, is_over_in
from api.logs.follow import IsOver, JobFollower
from api.logs.position import Position, format_event_id
from api.logs.tail import tail_position
from api.shelf import Event, Kept, Shelf
from api.sse import encoded
from muster.contracts.job import JobUid
from muster.contracts.layout import DataDirectory, JobFiles
from store.records import Job

POLL_SECONDS: Final = 0.1


class Feed:
    """What comes after the moment at which it was opened, in events that are numbered from 0."""

    def __init__(
        self,
        uid: JobUid,
        files: JobFiles,
        rank: int | None,
        look: Callable[[], Awaitable[Glance | None]],
        is_closing: Callable[[], bool],
        readers: CapacityLimiter,
        kept: Kept,
    ) -> None:
        self._uid = uid
        self._files = files
        self._rank = rank
        self._look = look
        self._is_closing = is_closing
        self._readers = readers
        self._count = 0
        self._position: Position = {}
        """Behind all events so far."""
        self._kept = kept
        self._moved = asyncio.Event()
        self._opened = asyncio.Event()
        self.listeners = 0
        self.is_over = False
        self._reading = asyncio.create_task(self._read_on())

    def close(self) -> None:
        self._reading.cancel()
        self._kept.close()

    async def end(self) -> Glance | None:
        """Return how the job was last seen, when there is nothing more to read."""
        return await asyncio.shield(self._reading)

    async def follow(self, position: Position) -> AsyncIterator[Event]:
        """Yield everything behind `position`, until the job is over or the service ends."""
        await self._opened.wait()
        while True:
            number, until = self._count, self._position
            reader = JobFollower(self._files, self._rank, position, until)
            while event := await self._next(reader, _everything):
                yield event
                if self._is_closing():
                    return
            position, is_ahead = reader.position, reader.is_ahead
            # Unless it is ahead, exactly what lies below `until` has been handed out.
            while not is_ahead and self._count - len(self._kept) <= number:
                if number < self._count:
                    event = self._kept[number - self._count]
                    position, number = event.position, number + 1
                    yield event
                elif self.is_over:
                    return
                else:
                    await self._moved.wait()
            if is_ahead and number == self._count:
                if self.is_over:
                    return
                await self._moved.wait()

    async def _read_on(self) -> Glance | None:
        try:
            self._position = await run_sync(
                tail_position, self._files, self._rank, 0, limiter=self._readers
            )
            self._opened.set()
            reader = JobFollower(self._files, self._rank, self._position)
            while True:
                # Looked at before the files are read: what had ended by then wrote all it will.
                glance = await self._look()
                while event := await self._next(reader, is_over_in(glance)):
                    self._hand_out(event)
                    if self._is_closing():
                        return glance
                if glance is None or glance.job.is_terminal or self._is_closing():
                    return glance
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self.is_over = True
            self._opened.set()
            self._moved.set()

    def _hand_out(self, event: Event) -> None:
        self._kept.append(event)
        self._count += 1
        self._position = event.position
        self._moved.set()
        self._moved = asyncio.Event()

    async def _next(self, reader: JobFollower, is_over: IsOver) -> Event | None:
        return await run_sync(_event, self._uid, reader, is_over, limiter=self._readers)


class Feeds:
    """The feeds of one event loop: one for each job, or rank of a job, that anybody follows."""

    def __init__(
        self,
        files: DataDirectory,
        glances: Glances,
        *,
        is_closing: Callable[[], bool],
        readers: CapacityLimiter,
    ) -> None:
        self._files = files
        self._glances = glances
        self._is_closing = is_closing
        self._readers = readers
        self._shelf = Shelf()
        self._feeds: dict[tuple[JobUid, int | None], Feed] = {}

    @asynccontextmanager
    async def of(self, job: Job, rank: int | None) -> AsyncIterator[Feed]:
        """Lend the feed of a job, all ranks or one; the last who leaves closes it."""
        key = (job.uid, rank)
        feed = self._feeds.get(key)
        if feed is None or feed.is_over:
            feed = self._feeds[key] = self._open(job, rank)
        feed.listeners += 1
        try:
            yield feed
        finally:
            feed.listeners -= 1
            if not feed.listeners:
                feed.close()
                if self._feeds.get(key) is feed:
                    del self._feeds[key]

    def _open(self, job: Job, rank: int | None) -> Feed:
        async def look() -> Glance | None:
            glance = await self._glances.look(job.job_id)
            return glance if glance is not None and glance.job.uid == job.uid else None

        files = self._files.job(job.job_id)
        return Feed(job.uid, files, rank, look, self._is_closing, self._readers, self._shelf.kept())


def _event(uid: JobUid, reader: JobFollower, is_over: IsOver) -> Event | None:
    batch = reader.next_batch(is_over)
    if batch is None:
        return None
    return Event(encoded(format_event_id(uid, batch.position), batch.text), batch.position)


def _everything(_name: object) -> bool:
    """Below a place that was reached before there is nothing that is not complete."""
    return True
