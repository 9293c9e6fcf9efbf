"""Idempotency keys: the first response to each key is stored, so a repeated request has one effect.

The row is written in the transaction that creates the job, so neither exists without the other. It
outlives the job, since a late retry must not create a second one; the job's environment, which may
hold secrets, does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, TypeAlias

import msgspec
from sqlalchemy import Connection, bindparam, delete, select

from database.engine import Database
from database.errors import IdempotencyConflict
from database.records import Clock, Job, utc_now
from database.tables import ANSWERS, JOBS

RETENTION: Final = timedelta(hours=24)  # longer than any client retries

PRUNE_INTERVAL: Final = timedelta(minutes=1)
"""Pruning with every new key would double the cost of a write."""

_FIND: Final = select(
    ANSWERS.c.principal, ANSWERS.c.key, ANSWERS.c.request_sha256, ANSWERS.c.job
).where(
    ANSWERS.c.principal.in_(bindparam("by", expanding=True)),
    ANSWERS.c.key.in_(bindparam("called", expanding=True)),
    ANSWERS.c.created_at > bindparam("since"),
)
_SPEC: Final = select(JOBS.c.spec).where(
    JOBS.c.job_id == bindparam("id"), JOBS.c.uid == bindparam("identity")
)
_PRUNE: Final = delete(ANSWERS).where(ANSWERS.c.created_at <= bindparam("until"))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyKey:
    """A key, who sent it, and for which request."""

    principal: str
    key: str  # at most 255 characters
    request_sha256: str  # hash of everything that identifies the request


StoredAnswers: TypeAlias = dict[tuple[str, str], tuple[str, Job]]
"""By principal and key: hash of the request, and the job."""


class Answers:
    """The stored responses of the last 24 hours."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database = database
        self._clock = clock
        self._upsert = database.upsert(ANSWERS)  # may replace an expired response
        self._pruned_at: datetime | None = None

    def find(self, key: IdempotencyKey) -> Job | None:
        """Return the job of the original response; None for a new key.

        A job that was deleted since comes without its `env`. Raises `IdempotencyConflict` if the
        key was used for a different request.
        """
        with self._database.reading() as connection:
            answer = answer_to(key, self.find_in(connection, [key], self._clock()))
        if isinstance(answer, IdempotencyConflict):
            raise answer
        return answer

    def find_in(
        self, connection: Connection, keys: Sequence[IdempotencyKey], now: datetime
    ) -> StoredAnswers:
        """Return the responses to all `keys`, and maybe others, inside a transaction."""
        if not keys:
            return {}
        by, called = {key.principal for key in keys}, {key.key for key in keys}
        wanted = {"by": list(by), "called": list(called), "since": now - RETENTION}
        return {
            (row.principal, row.key): (row.request_sha256, _with_spec(connection, row.job))
            for row in connection.execute(_FIND, wanted).all()
        }

    def keep_in(
        self,
        connection: Connection,
        answered: Sequence[tuple[IdempotencyKey, Job]],
        now: datetime,
    ) -> None:
        """Store the jobs as responses, inside a transaction, and now and then prune old ones."""
        if not answered:
            return
        if self._pruned_at is None or now - self._pruned_at >= PRUNE_INTERVAL:
            connection.execute(_PRUNE, {"until": now - RETENTION})
            self._pruned_at = now  # after a rollback the next prune comes a minute later
        connection.execute(
            self._upsert,
            [
                {
                    "principal": key.principal,
                    "key": key.key,
                    "request_sha256": key.request_sha256,
                    "job": replace(job, spec=msgspec.structs.replace(job.spec, env={})),
                    "created_at": now,
                }
                for key, job in answered
            ],
        )


def answer_to(key: IdempotencyKey, stored: StoredAnswers) -> Job | IdempotencyConflict | None:
    """Return the job of the original response; an error if that was to another request."""
    sha256, job = stored.get((key.principal, key.key), (key.request_sha256, None))
    return job if sha256 == key.request_sha256 else IdempotencyConflict(key.key)


def _with_spec(connection: Connection, job: Job) -> Job:
    spec = connection.scalar(_SPEC, {"id": job.job_id, "identity": job.uid})
    return job if spec is None else replace(job, spec=spec)
