"""What is known of the ranks of a job. Only `store.tenure` writes it."""

from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import Row, bindparam, select

from muster.contracts.job import JobId
from store.database import Database
from store.records import Worker
from store.tables import WORKERS

_OF_JOBS: Final = (
    select(WORKERS)
    .where(WORKERS.c.job_id.in_(bindparam("ids", expanding=True)))
    .order_by(WORKERS.c.job_id, WORKERS.c.rank)
)
_FIELDS: Final = tuple(column.name for column in WORKERS.c)[1:]
"""All but the job's id."""


class Workers:
    """The ranks of all jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_job(self, job_id: JobId) -> list[Worker]:
        """Return the job's ranks, the lowest first; none if there is no such job."""
        return self.of_jobs([job_id])[job_id]

    def of_jobs(self, job_ids: Collection[JobId]) -> dict[JobId, list[Worker]]:
        """Return the ranks of each of the jobs, of one moment."""
        found: dict[JobId, list[Worker]] = {job_id: [] for job_id in job_ids}
        with self._database.reading() as connection:
            rows = connection.execute(_OF_JOBS, {"ids": list(found)}).all()
        for row in rows:
            found[row.job_id].append(_worker(row))
        return found


def _worker(row: Row[Any]) -> Worker:
    return Worker(**dict(zip(_FIELDS, row[1:], strict=True)))
