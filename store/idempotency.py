"""A request sent twice has one effect: the first answer is kept under the caller's key.

The row is written in the transaction that creates the job, so that there is never one without
the other, and it outlives the job: a late retry must not create a second one. What people put into
a job's environment does not outlive it.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import Connection, bindparam, delete, select

from store.clock import Clock, utc_now
from store.database import Database
from store.errors import IdempotencyConflict
from store.records import Job
from store.rows import find_job
from store.tables import ANSWERS

KEPT: Final = timedelta(hours=24)
"""Longer than any client goes on retrying."""

FORGET_EVERY: Final = timedelta(minutes=1)
"""How exactly that is kept: to look for old ones with every new one would cost as much again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyKey:
    """Whose key, and for which request."""

    principal: str
    key: str
    """At most 255 characters."""
    request_sha256: str
    """Of everything that makes the request what it is."""


_FIND: Final = select(ANSWERS.c.request_sha256, ANSWERS.c.job).where(
    ANSWERS.c.principal == bindparam("by"),
    ANSWERS.c.key == bindparam("called"),
    ANSWERS.c.created_at > bindparam("since"),
)
_FORGET: Final = delete(ANSWERS).where(ANSWERS.c.created_at <= bindparam("until"))


class Answers:
    """The first answers of the last 24 hours."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database = database
        self._clock = clock

    def find(self, key: IdempotencyKey) -> Job | None:
        """Return the job as it was first answered, or None for a new key.

        One that was deleted since comes without its `env`.

        Raises `IdempotencyConflict` if the key belongs to another request.
        """
        with self._database.reading() as connection:
            return find_answer(connection, key, self._clock())


def find_answer(connection: Connection, key: IdempotencyKey, now: datetime) -> Job | None:
    """Do the work of `Answers.find` inside a transaction."""
    row = connection.execute(
        _FIND, {"by": key.principal, "called": key.key, "since": now - KEPT}
    ).one_or_none()
    if row is None:
        return None
    if row.request_sha256 != key.request_sha256:
        raise IdempotencyConflict(key.key)
    job: Job = row.job
    there = find_job(connection, job.job_id)
    return job if there is None or there.uid != job.uid else replace(job, spec=there.spec)


class AnswerBook:
    """Writes the first answers, inside transactions of others."""

    def __init__(self, database: Database) -> None:
        # It replaces one that nobody is answered with any more.
        self._keep = database.upsert(ANSWERS)
        self._forgotten_at: datetime | None = None

    def keep(self, connection: Connection, key: IdempotencyKey, job: Job, now: datetime) -> None:
        """Keep `job` as the answer, and now and then forget those nobody asks for any more."""
        if self._forgotten_at is None or now - self._forgotten_at >= FORGET_EVERY:
            connection.execute(_FORGET, {"until": now - KEPT})
            self._forgotten_at = now  # if this is undone they go a minute later, which is as good
        connection.execute(
            self._keep,
            {
                "principal": key.principal,
                "key": key.key,
                "request_sha256": key.request_sha256,
                "job": replace(job, spec=msgspec.structs.replace(job.spec, env={})),
                "created_at": now,
            },
        )
