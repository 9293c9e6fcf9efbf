"""What a synchronous job has made durable, and what it has read. Only `store.tenure` writes it."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, Table, and_, bindparam, delete, func, or_, select

from muster.contracts.job import JobId
from store.database import Database
from store.records import Audit, Commit, EpochRecord
from store.tables import COMMITS, EPOCHS

COMMITS_KEPT: Final = 1000
"""Of each job. The audit shows as many, and a job that saves every second would have millions."""


def _last(table: Table, order: str) -> Select[Any]:
    return (
        select(*[column for column in table.c if column.name != "job_id"])
        .where(table.c.job_id == bindparam("id"))
        .order_by(table.c[order].desc())
        .limit(bindparam("most"))
    )


_LAST_COMMITS: Final = _last(COMMITS, "step")
_NEWEST_TO_GO: Final = (
    select(COMMITS.c.step)
    .where(COMMITS.c.job_id == bindparam("id"))
    .order_by(COMMITS.c.step.desc())
    .offset(COMMITS_KEPT)
    .limit(1)
    .scalar_subquery()
)
_PRUNE: Final = delete(COMMITS).where(
    COMMITS.c.job_id == bindparam("id"), COMMITS.c.step <= _NEWEST_TO_GO
)
_LAST_EPOCHS: Final = _last(EPOCHS, "epoch")
_ENOUGH: Final = EPOCHS.c.samples == EPOCHS.c.expected_samples
_EQUAL: Final = EPOCHS.c.hash_sum == EPOCHS.c.expected_hash_sum
# The same rule as `EpochRecord.exactly_once`, for all epochs of a job at once.
_COUNTS: Final = select(
    func.count().filter(and_(_ENOUGH, _EQUAL)),
    func.count().filter(
        or_(EPOCHS.c.samples > EPOCHS.c.expected_samples, and_(_ENOUGH, ~_EQUAL)),
    ),
    func.count(),
).where(EPOCHS.c.job_id == bindparam("id"))
_COUNT_COMMITS: Final = (
    select(func.count()).select_from(COMMITS).where(COMMITS.c.job_id == bindparam("id"))
)


class Commits:
    """The durable checkpoints of all ranks together, and the epochs behind them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_job(self, job_id: JobId, limit: int) -> list[Commit]:
        """Return the last `limit` commits of the job, the newest last."""
        with self._database.reading() as connection:
            return [Commit(**row) for row in _rows(connection, _LAST_COMMITS, job_id, limit)]

    def audit(self, job_id: JobId, limit: int) -> Audit:
        """Return the last `limit` commits and epochs of the job, and the verdict on every epoch."""
        with self._database.reading() as connection:
            exact, inexact, all_epochs = connection.execute(_COUNTS, {"id": job_id}).one()
            all_commits = connection.execute(_COUNT_COMMITS, {"id": job_id}).scalar_one()
            commits = _rows(connection, _LAST_COMMITS, job_id, limit)
            epochs = _rows(connection, _LAST_EPOCHS, job_id, limit)
        return Audit(
            commits=[Commit(**row) for row in commits],
            epochs=[EpochRecord(**row) for row in epochs],
            exact=exact,
            inexact=inexact,
            epochs_omitted=all_epochs - len(epochs),
            commits_omitted=all_commits - len(commits),
        )


def prune_commits(connection: Connection, job_ids: Sequence[JobId]) -> None:
    """Delete all but the newest `COMMITS_KEPT` commits of these jobs."""
    if job_ids:
        connection.execute(_PRUNE, [{"id": job_id} for job_id in job_ids])


def _rows(
    connection: Connection, query: Select[Any], job_id: JobId, limit: int
) -> list[dict[str, Any]]:
    found: list[Row[Any]] = list(connection.execute(query, {"id": job_id, "most": limit}))
    return [row._asdict() for row in reversed(found)]
