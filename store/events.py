"""What happened to a job. Appended by `store.jobs` and `store.tenure`, never changed."""

from typing import Final

from sqlalchemy import bindparam, select

from muster.contracts.job import JobId
from store.database import Database
from store.records import Event
from store.tables import EVENTS

_LAST: Final = (
    select(*[column for column in EVENTS.c if column.name != "job_id"])
    .where(EVENTS.c.job_id == bindparam("id"))
    .order_by(EVENTS.c.event_id.desc())
    .limit(bindparam("most"))
)


class Events:
    """The events of all jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_job(self, job_id: JobId, limit: int) -> list[Event]:
        """Return the last `limit` events of the job, the oldest of them first."""
        with self._database.reading() as connection:
            rows = connection.execute(_LAST, {"id": job_id, "most": limit}).all()
        return [Event(**row._asdict()) for row in reversed(rows)]
