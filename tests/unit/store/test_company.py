"""Writes share a transaction, and nothing else."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from store_samples import submit

from muster.contracts.job import JobId
from store.company import Company
from store.database import Database
from store.errors import JobExists, JobMissing, StoreError, StoreUnavailable
from store.jobs import Jobs

DEADLINE_SECONDS = 20.0

Write = Callable[[Any], str]


class Ledger:
    """Transactions that take no time, but for the first, which waits until it is let go."""

    def __init__(self) -> None:
        self.committed: list[list[str]] = []
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.trouble: StoreError | None = None

    @contextmanager
    def transaction(self) -> Iterator[list[str]]:
        self.begun.set()
        assert self.let_go.wait(DEADLINE_SECONDS)
        written: list[str] = []
        yield written
        if self.trouble is not None:
            raise self.trouble
        self.committed.append(written)


def writes(name: str) -> Write:
    def write(written: list[str]) -> str:
        written.append(name)
        return name.upper()

    return write


def raises(error: Exception) -> Write:
    def write(_: list[str]) -> str:
        raise error

    return write


def outcomes(ledger: Ledger, first: Write, *others: Write) -> list[str | Exception | None]:
    """Let `others` come while `first` is being committed; return what each is told."""
    company = Company(ledger.transaction)  # type: ignore[arg-type]  # a list for a connection
    with ThreadPoolExecutor(1 + len(others)) as threads:
        told: list[Future[str]] = [threads.submit(company.write, first)]
        assert ledger.begun.wait(DEADLINE_SECONDS)
        told += [threads.submit(company.write, other) for other in others]
        deadline = time.monotonic() + DEADLINE_SECONDS
        while company.waiting < len(others):
            assert time.monotonic() < deadline, "they do not come"
            time.sleep(0.001)
        ledger.let_go.set()
    return [each.exception() or each.result() for each in told]


def test_those_who_wait_while_another_is_committed_share_the_next_transaction() -> None:
    ledger = Ledger()
    assert sorted(outcomes(ledger, *map(writes, "abcde"))) == list("ABCDE")  # type: ignore[type-var]
    assert ledger.committed[0] == ["a"]
    assert [sorted(written) for written in ledger.committed[1:]] == [["b", "c", "d", "e"]]


def test_who_is_refused_is_told_and_nobody_else() -> None:
    ledger, refusal = Ledger(), JobMissing(JobId("gone"))
    told = outcomes(ledger, writes("a"), raises(refusal), writes("b"))
    assert told == ["A", refusal, "B"]
    assert ledger.committed == [["a"], ["b"]]


def test_what_goes_wrong_with_one_is_undone_and_the_others_are_written_without_it() -> None:
    ledger, fault = Ledger(), ValueError("no such value")
    told = outcomes(ledger, writes("a"), writes("b"), raises(fault), writes("c"))
    assert told == ["A", "B", fault, "C"]
    assert ledger.committed[0] == ["a"]
    assert sorted(ledger.committed[1:]) == [["b"], ["c"]]


def test_when_the_database_is_away_everybody_who_waits_is_told_at_once() -> None:
    ledger = Ledger()
    ledger.trouble = StoreUnavailable("away")
    assert outcomes(ledger, *map(writes, "abc")) == [ledger.trouble] * 3
    assert ledger.committed == []


def test_who_comes_after_the_trouble_is_served() -> None:
    ledger = Ledger()
    ledger.let_go.set()
    company = Company(ledger.transaction)  # type: ignore[arg-type]  # a list for a connection
    ledger.trouble = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        company.write(writes("a"))
    ledger.trouble = None
    assert company.write(writes("b")) == "B"
    assert ledger.committed == [["b"]]


def test_of_many_at_once_each_gets_its_own_job_or_its_own_refusal(
    database: Database, jobs: Jobs
) -> None:
    names = [f"job-{number % 10}" for number in range(40)]

    def attempt(place: int) -> str | None:
        try:
            return submit(jobs, names[place], uid=f"uid-{place}").job_id
        except JobExists:
            return None

    with ThreadPoolExecutor(8) as threads:
        found = [name for name in threads.map(attempt, range(len(names))) if name]
    assert sorted(found) == sorted(set(names))
    assert sorted(job.job_id for job in Jobs(database).unfinished()) == sorted(found)


def test_of_many_at_once_under_one_key_one_is_the_job_and_all_are_answered_with_it(
    jobs: Jobs,
) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda n: submit(jobs, f"job-{n}", uid=f"uid-{n}", key="k"), range(8))
    assert len({job.uid for job in found}) == 1
    assert len(jobs.unfinished()) == 1
