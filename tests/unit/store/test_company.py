"""Writes share a transaction, and nothing else."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from store_samples import everything, idempotency_key, submit

from muster.contracts.job import JobId, JobUid
from muster.contracts.spec import JobSpec
from store import database as database_module
from store.company import write_together
from store.database import Database
from store.errors import JobExists, JobMissing, StoreError, StoreUnavailable
from store.jobs import Jobs

Write = Callable[[Any], str]


class Ledger:
    """Transactions, each a list of what was written in it."""

    def __init__(self) -> None:
        self.begun = 0
        self.committed: list[list[str]] = []
        self.trouble: StoreError | None = None
        self.trouble_from = 1
        """The transaction that is the first to meet it."""

    @contextmanager
    def transaction(self) -> Iterator[list[str]]:
        self.begun += 1
        written: list[str] = []
        yield written
        if self.trouble is not None and self.begun >= self.trouble_from:
            raise self.trouble
        self.committed.append(written)

    def outcomes(self, *works: Write) -> list[str | Exception]:
        return write_together(self.transaction, works)  # type: ignore[arg-type]  # as a connection


def writes(name: str) -> Write:
    def write(written: list[str]) -> str:
        written.append(name)
        return name.upper()

    return write


def raises(error: Exception) -> Write:
    def write(_: list[str]) -> str:
        raise error

    return write


def test_those_who_write_together_share_a_transaction() -> None:
    ledger = Ledger()
    assert ledger.outcomes(*map(writes, "abc")) == ["A", "B", "C"]
    assert ledger.committed == [["a", "b", "c"]]


def test_who_is_refused_is_told_and_nobody_else() -> None:
    ledger, refusal = Ledger(), JobMissing(JobId("gone"))
    assert ledger.outcomes(writes("a"), raises(refusal), writes("b")) == ["A", refusal, "B"]
    assert ledger.committed == [["a", "b"]]


def test_what_goes_wrong_with_one_is_undone_and_the_others_are_written_without_it() -> None:
    ledger, fault = Ledger(), ValueError("no such value")
    assert ledger.outcomes(writes("a"), raises(fault), writes("b")) == ["A", fault, "B"]
    assert ledger.committed == [["a"], ["b"]]


def test_when_the_database_is_away_all_are_told_after_one_attempt() -> None:
    ledger = Ledger()
    ledger.trouble = StoreUnavailable("away")
    assert ledger.outcomes(*map(writes, "abc")) == [ledger.trouble] * 3
    assert ledger.begun == 1
    assert ledger.committed == []


def test_a_database_that_goes_away_between_them_is_waited_for_once() -> None:
    ledger, fault = Ledger(), ValueError("no such value")
    ledger.trouble, ledger.trouble_from = StoreUnavailable("away"), 3
    outcomes = ledger.outcomes(writes("a"), writes("b"), raises(fault), writes("c"))
    assert outcomes == ["A", *[ledger.trouble] * 3]
    assert ledger.begun == 3
    assert ledger.committed == [["a"]]


def test_who_has_written_is_told_so_though_the_database_was_away_for_the_first(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = [StoreUnavailable("away"), "B", JobMissing(JobId("gone"))]
    monkeypatch.setattr(database_module, "write_together", lambda *_: mixed)
    assert database.write_together([]) == mixed


def test_of_those_who_want_one_id_the_first_gets_it(database: Database, jobs: Jobs) -> None:
    spec = JobSpec(world_size=2)
    outcomes = jobs.create_all(
        [
            jobs.creation(JobId(name), JobUid(uid), spec, message=None, idempotency=None)
            for name, uid in (("a", "1"), ("b", "2"), ("a", "3"))
        ]
    )
    assert isinstance(outcomes[2], JobExists)
    rows = everything(database)
    assert [(row[0], row[1]) for row in rows["jobs"]] == [("a", "1"), ("b", "2")]
    assert len(rows["events"]) == 2


def test_of_those_under_one_key_the_first_is_the_job_and_the_answer_to_all(jobs: Jobs) -> None:
    key, spec = idempotency_key("k"), JobSpec(world_size=2)
    outcomes = jobs.create_all(
        [
            jobs.creation(JobId(name), JobUid(name), spec, message=None, idempotency=key)
            for name in "abc"
        ]
    )
    assert outcomes == [jobs.get(JobId("a"))] * 3
    assert len(jobs.unfinished()) == 1


def test_many_threads_may_write_at_once(jobs: Jobs) -> None:
    names = [f"job-{number % 10}" for number in range(40)]

    def attempt(place: int) -> str | None:
        try:
            return submit(jobs, names[place], uid=f"uid-{place}").job_id
        except JobExists:
            return None

    with ThreadPoolExecutor(8) as threads:
        found = [name for name in threads.map(attempt, range(len(names))) if name]
    assert sorted(found) == sorted(set(names))
    assert sorted(job.job_id for job in jobs.unfinished()) == sorted(found)
