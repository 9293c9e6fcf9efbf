"""Group commit: writes share a transaction, and a failing write affects no other."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from database.engine import Database
from database.errors import DatabaseUnavailable, IdempotencyConflict, JobExists, JobMissing
from database.jobs import Jobs, NewJob
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobUid
from tests.support.database_samples import everything, idempotency_key

AWAY = DatabaseUnavailable("away")
REFUSED = JobMissing(JobId("gone"))
BROKEN = ValueError("no such value")


class Ledger(Database):
    """Transactions as lists of what was written; transaction number `away_from` and later fail."""

    def __init__(self, away_from: int = 99) -> None:
        self.begun = 0
        self.committed: list[list[str]] = []
        self.away_from = away_from

    @contextmanager
    def writing(self):  # type: ignore[no-untyped-def,override]  # noqa: ANN201
        self.begun += 1
        written: list[str] = []
        yield written
        if self.begun >= self.away_from:
            raise AWAY
        self.committed.append(written)

    def outcomes(self, *results: str | Exception) -> list[str | Exception]:
        """Write each string, refuse each error of the database, and raise any other."""
        return self.write_together(results, self._write)

    @staticmethod
    def _write(written, results):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        for result in results:
            if isinstance(result, ValueError):
                raise result
            if isinstance(result, str):
                written.append(result)
        return list(results)


CASES = {
    "all succeed": (["a", "b"], 99, ["a", "b"], [["a", "b"]]),
    "one is refused": (["a", REFUSED, "b"], 99, ["a", REFUSED, "b"], [["a", "b"]]),
    "one fails": (["a", BROKEN, "b"], 99, ["a", BROKEN, "b"], [["a"], ["b"]]),
    "away": (["a", "b"], 1, [AWAY, AWAY], []),
    "away later": (["a", "b", BROKEN, "c"], 3, ["a", AWAY, AWAY, AWAY], [["a"]]),
}


@pytest.mark.parametrize(
    ("writes", "away_from", "expected", "committed"), CASES.values(), ids=CASES
)
def test_each_write_gets_its_own_result(
    writes: list[str | Exception],
    away_from: int,
    expected: list[str | Exception],
    committed: list[list[str]],
) -> None:
    ledger = Ledger(away_from)
    assert ledger.outcomes(*writes) == expected
    assert ledger.committed == committed
    assert ledger.begun <= away_from, "an outage is waited for once"


def test_one_id_in_one_group_goes_to_the_first(database: Database, jobs: Jobs) -> None:
    outcomes = jobs.create(
        [
            NewJob(JobId(name), JobUid(uid), JobSpec(), None, None)
            for name, uid in (("a", "1"), ("b", "2"), ("a", "3"))
        ]
    )
    assert isinstance(outcomes[2], JobExists)
    rows = everything(database)
    assert [jobs.get(JobId(name)).uid for name in "ab"] == ["1", "2"]
    assert len(rows["jobs"]) == 2
    assert len(rows["events"]) == 2


def test_one_key_in_one_group_makes_one_job(jobs: Jobs) -> None:
    key = idempotency_key("k")
    other = replace(key, request_sha256="another")
    outcomes = jobs.create(
        [
            NewJob(JobId(name), JobUid(name), JobSpec(), None, used)
            for name, used in (("a", key), ("b", key), ("c", other), ("d", key))
        ]
    )
    assert isinstance(outcomes.pop(2), IdempotencyConflict)
    assert outcomes == [jobs.get(JobId("a"))] * 3
    assert len(jobs.unfinished()) == 1
