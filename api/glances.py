"""The newest known state of the jobs that are watched: one read serves all streams and waits.

Fifty open streams of one job cost one look at the database every tenth of a second.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from anyio.to_thread import run_sync

from muster.contracts.job import JobId
from muster.contracts.layout import LogName
from muster.contracts.rank import ProcessState
from store.errors import StoreUnavailable
from store.records import Job, Worker

FRESH_SECONDS: Final = 0.1
"""How old a glance may be: the delay it adds to the end of a stream."""

PATIENCE_SECONDS: Final = 0.5
"""How long a watcher who has seen the job waits for a store that does not answer."""

FORGET_SECONDS: Final = 60.0
"""A job nobody looked at for this long is forgotten, so that few are kept."""


@dataclass(frozen=True, slots=True)
class Glance:
    """A job and its ranks at one moment."""

    job: Job
    workers: Sequence[Worker]


Reading: TypeAlias = asyncio.Task[Glance | None]


def is_over_in(glance: Glance | None) -> Callable[[LogName], bool]:
    """Return which incarnations are known to write no more; all of them, if the job is gone."""
    if glance is None or glance.job.is_terminal:
        return lambda _name: True
    latest = {worker.rank: worker for worker in glance.workers}

    def is_over(name: LogName) -> bool:
        worker = latest.get(name.rank)
        if worker is None or name.incarnation > worker.incarnation:
            return False
        return name.incarnation < worker.incarnation or worker.state == ProcessState.EXITED

    return is_over


class Glances:
    """Shared by everybody on one event loop."""

    def __init__(
        self, read: Callable[[JobId], Glance | None], monotonic: Callable[[], float]
    ) -> None:
        self._read = read
        self._monotonic = monotonic
        self._known: dict[JobId, tuple[float, Glance]] = {}
        self._reading: dict[JobId, Reading] = {}
        self._next: dict[JobId, Reading] = {}
        """Reads that wait for the present one to end, and begin after it."""

    async def look(self, job_id: JobId) -> Glance | None:
        """Return the job as it was at most `FRESH_SECONDS` ago, or None if there is none.

        While the store is away the last glance is returned; without one `StoreUnavailable`
        is raised.
        """
        known = self._known.get(job_id)
        if known is not None and self._monotonic() - known[0] < FRESH_SECONDS:
            return known[1]
        reading = self._reading.get(job_id) or self._begin(job_id)
        # A watcher that goes away must not take the others' read with it.
        patience = None if known is None else PATIENCE_SECONDS
        await asyncio.wait([reading], timeout=patience)
        if known is not None and not reading.done():
            return known[1]
        try:
            return reading.result()
        except StoreUnavailable:
            if job_id in self._known:
                return self._known[job_id][1]
            raise

    async def look_anew(self, job_id: JobId) -> Glance | None:
        """Return the job as it is now: the id that others have seen may be another job's by now.

        All who come while one read goes on share the next. Raises `StoreUnavailable`.
        """
        coming = self._next.get(job_id)
        if coming is None:
            coming = self._next[job_id] = _begun(self._read_next(job_id))
        await asyncio.wait([coming])
        return coming.result()

    async def _read_next(self, job_id: JobId) -> Glance | None:
        try:
            while reading := self._reading.get(job_id):
                await reading  # where the store is away, it is so for those who come now, too
        finally:
            del self._next[job_id]
        return await self._begin(job_id)

    def _begin(self, job_id: JobId) -> Reading:
        reading = self._reading[job_id] = _begun(self._refresh(job_id))
        return reading

    async def _refresh(self, job_id: JobId) -> Glance | None:
        began = self._monotonic()
        try:
            glance = await run_sync(self._read, job_id)
        finally:
            del self._reading[job_id]
        self._forget_old()
        # An absent job is not remembered: it may be submitted the next moment.
        self._known.pop(job_id, None)
        if glance is not None:
            self._known[job_id] = (began, glance)
        return glance

    def _forget_old(self) -> None:
        limit = self._monotonic() - FORGET_SECONDS
        for job_id in [job_id for job_id, (at, _) in self._known.items() if at < limit]:
            del self._known[job_id]


def _begun(read: Coroutine[Any, Any, Glance | None]) -> Reading:
    reading = asyncio.create_task(read)
    reading.add_done_callback(_heard)
    return reading


def _heard(reading: Reading) -> None:
    """Look at what went wrong, so that asyncio does not complain: all who waited may have left."""
    if not reading.cancelled():
        reading.exception()
