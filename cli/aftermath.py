"""What becomes of a rank after a fault: the job's events as they come, until it lives again."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from muster.client.news import news
from muster.contracts.errors import MusterError
from muster.contracts.job import TERMINAL
from muster.contracts.rank import ProcessState

if TYPE_CHECKING:
    from muster.client import Job
    from muster.client.views import EventView, WorkerView

PATIENCE_SECONDS: Final = 60.0
SILENCE_SECONDS: Final = 5.0
"""After so long without an end a person wonders whether the fault has reached anybody."""
LOOK_SECONDS: Final = 0.2
FINISHED: Final = "finished"
"""What the API says of a rank that has nothing left to do."""


class NotBack(MusterError):
    """A minute has passed, and the rank neither lives again nor is done; it may not have ended."""


class Aftermath:
    """Made before the fault, so that what it brings is known from what was there."""

    def __init__(
        self,
        job: "Job",
        worker: "WorkerView",
        why_it_lingers: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`worker` is the rank of the job's summary before the fault.

        `why_it_lingers` is what to tell a person if this fault does not end the process.
        """
        self._job = job
        self._worker = worker
        self._why_it_lingers = why_it_lingers
        self._monotonic = monotonic
        self._sleep = sleep
        self._told: EventView | None = None
        for _ in self._news():
            pass

    def sentences(self) -> Iterator[str]:
        """Yield each event, until the rank lives again or will not; then what it has come to.

        Raises `NotBack` after a minute.
        """
        rank, pid = self._worker.rank, self._worker.pid
        began = self._monotonic()
        is_same, is_told = True, False
        while (elapsed := self._monotonic() - began) < PATIENCE_SECONDS:
            # Looked at before the events: they then tell how it came to this.
            summary = self._job.summary()
            now = next((it for it in summary.workers if it.rank == rank), self._worker)
            yield from self._news()
            if now.worker_id != self._worker.worker_id and now.state == ProcessState.LIVE:
                yield f"rank {rank} lives again, as pid {now.pid}"
                return
            if summary.status in TERMINAL or now.state == FINISHED:
                yield f"rank {rank} does not come back: it is done, or its job is over"
                return
            is_same = self._is_same(now)
            if is_same and not is_told and elapsed >= SILENCE_SECONDS:
                yield f"rank {rank} (pid {pid}) has not ended yet"
                is_told = True
            self._sleep(LOOK_SECONDS)
        if is_same:
            raise NotBack(f"rank {rank} (pid {pid}) has not ended: {self._why_it_lingers}")
        raise NotBack(f"rank {rank} is not back after {PATIENCE_SECONDS:g} s")

    def _is_same(self, now: "WorkerView") -> bool:
        """Whether the rank has the very process that met the fault."""
        return (now.worker_id, now.pid) == (self._worker.worker_id, self._worker.pid)

    def _news(self) -> Iterator[str]:
        for event in news(self._job.events(), self._told):
            self._told = event
            yield event.message
