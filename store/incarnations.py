"""Every process that a job's ranks have had. Only `store.tenure` writes it."""

from datetime import datetime
from typing import Final, TypeAlias

from sqlalchemy import bindparam, func, select, tuple_

from muster.contracts.job import JobId
from store.database import Database
from store.records import Incarnation
from store.tables import INCARNATIONS

Place: TypeAlias = tuple[datetime, int, int]
"""When a process was started, of which rank, and which incarnation."""

_PLACE: Final = (
    INCARNATIONS.c.started_at,
    INCARNATIONS.c.rank,
    INCARNATIONS.c.incarnation,
)
_OF_JOB: Final = (
    select(*[column for column in INCARNATIONS.c if column.name != "job_id"])
    .where(INCARNATIONS.c.job_id == bindparam("id"))
    .order_by(*[column.desc() for column in _PLACE])
    .limit(bindparam("most"))
)
_COUNT: Final = (
    select(func.count()).select_from(INCARNATIONS).where(INCARNATIONS.c.job_id == bindparam("id"))
)


class Incarnations:
    """The incarnations of all jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, job_id: JobId, limit: int, after: Place | None) -> list[Incarnation]:
        """Return up to `limit` of them, the last one started first.

        `after` is the place of the last one seen: none is shown twice or left out, whatever is
        started meanwhile.
        """
        query = _OF_JOB
        if after is not None:
            types = [column.type for column in _PLACE]
            query = query.where(tuple_(*_PLACE) < tuple_(*after, types=types))
        with self._database.reading() as connection:
            rows = connection.execute(query, {"id": job_id, "most": limit})
            return [Incarnation(**row._asdict()) for row in rows]

    def count(self, job_id: JobId) -> int:
        with self._database.reading() as connection:
            return connection.execute(_COUNT, {"id": job_id}).scalar_one()
