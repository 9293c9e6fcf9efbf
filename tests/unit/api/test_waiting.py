"""Who waits for a job waits for that one, whatever was seen under its id before."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

from unit.api.jobs import JOB

from api.glances import Glance, Glances
from api.waiting import awaited
from muster.contracts.job import TERMINAL, JobId, JobStatus, JobUid
from store.errors import StoreUnavailable


def test_a_store_that_goes_away_does_not_bring_back_the_earlier_job_of_that_id() -> None:
    waited_for = replace(JOB, uid=JobUid("later"))
    over = replace(waited_for, status=JobStatus.COMPLETED)
    seen = [JOB, waited_for, StoreUnavailable("away"), over]

    def read(_: JobId) -> Glance:
        found = seen.pop(0)
        if isinstance(found, StoreUnavailable):
            raise found
        return Glance(found, ())

    async def stays() -> bool:
        return False

    async def story() -> None:
        moments = iter(range(100))
        glances = Glances(read, lambda: float(next(moments)))
        desk = SimpleNamespace(
            glances=glances,
            is_closing=lambda: False,
        )
        request = SimpleNamespace(is_disconnected=stays)
        await glances.look(JOB.job_id)
        assert await awaited(desk, request, JOB.job_id, TERMINAL, 20) == over

    asyncio.run(story())
