"""The log of durable checkpoints, and the audit whether each sample was read exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from database.engine import Database
from database.errors import DatabaseError
from database.fenced_writer import FencedWriter
from database.history import COMMITS_KEPT, History
from database.jobs import Jobs
from database.records import Audit, Job
from database.tables import Uint64
from muster.contracts.job.status import JobId
from tests.support.database_samples import (
    commit,
    epoch,
    nothing_moves,
    submit,
    take_lease,
    write_of,
)


@pytest.fixture
def history(database: Database) -> History:
    return History(database)


@pytest.fixture
def job(jobs: Jobs) -> Job:
    return submit(jobs, "a")


def write(database: Database, job: Job, **rows: object) -> None:
    FencedWriter(database, take_lease(database)).commit([write_of(job, **rows)])


def test_the_newest_checkpoints_come_last(
    database: Database, history: History, job: Job, jobs: Jobs
) -> None:
    made = [commit(step) for step in (5, 10, 15, 2**40)]
    write(database, job, commits=made)
    write(database, submit(jobs, "other"), commits=[commit(99)])
    assert history.audit(job.job_id, 10).commits == made
    assert history.audit(job.job_id, 2).commits == made[-2:]
    nothing = Audit(commits=[], epochs=[], exact=0, inexact=0)
    assert history.audit(JobId("none"), 2) == nothing


def test_a_step_saved_again_replaces_its_record(
    database: Database, history: History, job: Job
) -> None:
    again = commit(5, generation=2, digest="e" * 64)
    write(database, job, commits=[commit(5)])
    write(database, job, commits=[again])
    assert history.audit(job.job_id, 10).commits == [again]


def test_only_the_oldest_records_of_the_same_job_are_pruned(
    database: Database, history: History, job: Job, jobs: Jobs
) -> None:
    other = submit(jobs, "other")
    write(database, other, commits=[commit(1)])
    write(database, job, commits=[commit(step) for step in range(COMMITS_KEPT)])
    assert len(history.audit(job.job_id, 2 * COMMITS_KEPT).commits) == COMMITS_KEPT
    write(database, job, commits=[commit(2**40), commit(2**40 + 1)])
    kept = [found.step for found in history.audit(job.job_id, 2 * COMMITS_KEPT).commits]
    assert kept == [*range(2, COMMITS_KEPT), 2**40, 2**40 + 1]
    assert history.audit(other.job_id, 9).commits == [commit(1)]


@pytest.mark.parametrize("total", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_sum_of_hashes_keeps_all_bits(
    database: Database, history: History, job: Job, total: int
) -> None:
    made = commit(1, consumed_hash=total)
    record = epoch(0, hash_sum=total, expected_hash_sum=total)
    write(database, job, commits=[made], epochs=[record])
    found = history.audit(job.job_id, 1)
    assert found == Audit(commits=[made], epochs=[record], exact=1, inexact=0)


@pytest.mark.parametrize("total", [-1, 2**64])
def test_an_invalid_sum_of_hashes_leaves_no_trace(database: Database, job: Job, total: int) -> None:
    writer = FencedWriter(database, take_lease(database))
    with nothing_moves(database), pytest.raises((ValueError, DatabaseError)):
        writer.commit([write_of(job, commits=[commit(1), commit(2, consumed_hash=total)])])


@pytest.mark.slow
@given(st.integers(0, 2**64 - 1))
def test_uint64_survives_a_signed_column(total: int) -> None:
    stored = Uint64().process_bind_param(total, None)
    assert -(2**63) <= stored < 2**63
    assert Uint64().process_result_value(stored, None) == total


def test_an_audit_counts_what_it_does_not_list(
    database: Database, history: History, job: Job, jobs: Jobs
) -> None:
    listed = [epoch(number) for number in range(1, 5)]
    made = [commit(step) for step in (5, 10, 15)]
    write(database, job, commits=made, epochs=[epoch(0, hash_sum=1), *listed])
    write(database, submit(jobs, "other"), commits=made, epochs=[epoch(0)])
    found = history.audit(job.job_id, 2)
    assert (found.epochs, found.epochs_omitted) == (listed[-2:], 3)
    assert (found.commits, found.commits_omitted) == (made[-2:], 1)
    assert (found.exact, found.inexact) == (4, 1)


EPOCHS = {
    "read exactly once": ({}, True),
    "nothing read yet": ({"samples": 0, "hash_sum": 0}, None),
    "still being read": ({"samples": 99, "hash_sum": 7}, None),
    "another sample read": ({"hash_sum": 2**63 + 1}, False),
    "one read twice": ({"samples": 101, "hash_sum": 5}, False),
    "a zero hash read twice": ({"samples": 101}, False),
}


@pytest.mark.parametrize(("read", "verdict"), EPOCHS.values(), ids=EPOCHS)
def test_record_and_query_judge_an_epoch_alike(
    database: Database, history: History, job: Job, read: dict[str, int], verdict: object
) -> None:
    record = epoch(3, **read)
    write(database, job, epochs=[record])
    found = history.audit(job.job_id, 5)
    assert record.exactly_once is verdict
    counts = (found.exact, found.inexact)
    assert (found.epochs, counts) == ([record], (verdict is True, verdict is False))
