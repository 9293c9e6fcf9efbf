"""What happened to a job. Appended by `store.jobs` and `store.tenure`, never changed."""

from typing import Final

from sqlalchemy import bindparam, select

from muster.contracts.job import JobId
from store.database import Database
from store.records import Event
from store.tables import EVENTS

_OF_JOB: Final = (
    select(*[column for column in EVENTS.c if column.name != "job_id"])
    .where(EVENTS.c.job_id == bindparam("id"))
    .limit(bindparam("most"))
)
_LAST: Final = _OF_JOB.order_by(EVENTS.c.event_id.desc())
_NEXT: Final = _OF_JOB.where(EVENTS.c.event_id > bindparam("seen")).order_by(EVENTS.c.event_id)


class Events:
    """The events of all jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_job(self, job_id: JobId, limit: int) -> list[Event]:
        """Return the last `limit` events of the job, the oldest of them first."""
        with self._database.reading() as connection:
            rows = connection.execute(_LAST, {"id": job_id, "most": limit}).all()
        return [Event(**row._asdict()) for row in reversed(rows)]

    def following(self, job_id: JobId, event_id: int, limit: int) -> list[Event]:
        """Return the first `limit` events of the job after that of `event_id`, in their order."""
        with self._database.reading() as connection:
            rows = connection.execute(_NEXT, {"id": job_id, "seen": event_id, "most": limit})
            return [Event(**row._asdict()) for row in rows]
