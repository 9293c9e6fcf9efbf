"""Where jobs wait for one another on their way to the disk.

What has come while others are being stored is stored next, all of it in one transaction, by one
thread: a crowd that submits costs as many waits for the disk as there is time for, and no more. A
job that comes alone waits for nobody.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from anyio.to_thread import run_sync

from store.company import Work, trouble_of_all
from store.records import Job

Outcomes: TypeAlias = Sequence[Job | Exception]

_Waiting: TypeAlias = list[tuple[Work[Job], asyncio.Future[Job]]]


class Intake:
    """For one event loop. `store` is called in a thread, and `nudge` after it."""

    def __init__(
        self, store: Callable[[Sequence[Work[Job]]], Outcomes], nudge: Callable[[], None]
    ) -> None:
        self._store = store
        self._nudge = nudge
        self._waiting: _Waiting = []
        self._storing: asyncio.Task[None] | None = None

    async def take_in(self, creation: Work[Job]) -> Job:
        """Return the job, once it is durable, or raise what `creation` has raised."""
        told: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._waiting.append((creation, told))
        if self._storing is None:
            self._storing = asyncio.create_task(self._store_all())
        return await told

    async def _store_all(self) -> None:
        try:
            while taken := self._taken():
                try:
                    await self._store_together(taken)
                finally:
                    _dismiss(taken)
        finally:
            self._storing = None
            _dismiss(self._taken())

    async def _store_together(self, taken: _Waiting) -> None:
        try:
            outcomes = await run_sync(self._stored, [creation for creation, _ in taken])
        except Exception as error:  # noqa: BLE001  whatever it is, they are waiting to hear it
            outcomes = [error] * len(taken)
        if trouble := trouble_of_all(outcomes):
            # Who has come since has waited for the same: nobody need wait for it twice.
            taken += self._taken()
            outcomes = [trouble] * len(taken)
        for (_, told), outcome in zip(taken, outcomes, strict=True):
            _tell(told, outcome)

    def _taken(self) -> _Waiting:
        taken, self._waiting = self._waiting, []
        return taken

    def _stored(self, creations: Sequence[Work[Job]]) -> Outcomes:
        outcomes = self._store(creations)
        self._nudge()
        return outcomes


def _tell(told: asyncio.Future[Job], outcome: Job | Exception) -> None:
    if told.cancelled():
        return  # the client has left; its key finds the job
    if isinstance(outcome, Exception):
        told.set_exception(outcome)
    else:
        told.set_result(outcome)


def _dismiss(waiting: _Waiting) -> None:
    """Let those go who were told nothing, as the service ends: nobody else ever would."""
    for _, told in waiting:
        told.cancel()
