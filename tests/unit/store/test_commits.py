"""What is durable of a job, and whether each sample was read once."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_samples import commit, epoch, nothing_moves, submit, take_lease, write_of

from muster.contracts.job import JobId
from store.columns import Unsigned
from store.commits import COMMITS_KEPT, Commits
from store.database import Database
from store.errors import StoreError
from store.jobs import Jobs
from store.records import Audit, Commit, EpochRecord, Job
from store.tenure import Tenure


@pytest.fixture
def commits(database: Database) -> Commits:
    return Commits(database)


@pytest.fixture
def job(jobs: Jobs) -> Job:
    return submit(jobs, "a")


def write(
    database: Database,
    job: Job,
    *,
    commits: Sequence[Commit] = (),
    epochs: Sequence[EpochRecord] = (),
) -> None:
    tenure = Tenure(database, take_lease(database))
    tenure.commit([write_of(job, commits=commits, epochs=epochs)])


def test_the_last_commits_come_back_with_the_newest_last(
    database: Database, commits: Commits, job: Job, jobs: Jobs
) -> None:
    made = [commit(step) for step in (5, 10, 15, 2**40)]
    write(database, job, commits=made)
    write(database, submit(jobs, "other"), commits=[commit(99)])
    assert commits.of_job(job.job_id, 10) == made
    assert commits.of_job(job.job_id, 2) == made[-2:]
    assert commits.of_job(JobId("nobody"), 2) == []


def test_a_step_that_is_committed_again_is_written_over(
    database: Database, commits: Commits, job: Job
) -> None:
    again = commit(5, generation=2, digest="e" * 64)
    write(database, job, commits=[commit(5)])
    write(database, job, commits=[again])
    assert commits.of_job(job.job_id, 10) == [again]


def test_the_oldest_commits_of_a_long_job_are_forgotten_and_no_other_jobs(
    database: Database, commits: Commits, job: Job, jobs: Jobs
) -> None:
    other = submit(jobs, "other")
    write(database, other, commits=[commit(1)])
    write(database, job, commits=[commit(step) for step in range(COMMITS_KEPT)])
    assert len(commits.of_job(job.job_id, 2 * COMMITS_KEPT)) == COMMITS_KEPT
    write(database, job, commits=[commit(2**40), commit(2**40 + 1)])
    kept = [found.step for found in commits.of_job(job.job_id, 2 * COMMITS_KEPT)]
    assert kept == [*range(2, COMMITS_KEPT), 2**40, 2**40 + 1]
    assert commits.of_job(other.job_id, 9) == [commit(1)]


@pytest.mark.parametrize("total", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_sum_of_hashes_keeps_all_its_bits(
    database: Database, commits: Commits, job: Job, total: int
) -> None:
    made = commit(1, consumed_hash=total)
    record = epoch(0, hash_sum=total, expected_hash_sum=total)
    write(database, job, commits=[made], epochs=[record])
    found = commits.audit(job.job_id, 1)
    assert found == Audit(commits=[made], epochs=[record], exact=1, inexact=0)


@pytest.mark.parametrize("total", [-1, 2**64])
def test_what_is_no_sum_of_hashes_leaves_no_trace(database: Database, job: Job, total: int) -> None:
    tenure = Tenure(database, take_lease(database))
    with nothing_moves(database), pytest.raises((ValueError, StoreError)):
        tenure.commit([write_of(job, commits=[commit(1), commit(2, consumed_hash=total)])])


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**64 - 1), unique=True))
def test_different_sums_are_stored_differently(totals: list[int]) -> None:
    column = Unsigned()
    stored = [column.process_bind_param(total, None) for total in totals]
    assert len(set(stored)) == len(totals)
    assert all(-(2**63) <= value < 2**63 for value in stored)
    assert [column.process_result_value(value, None) for value in stored] == totals


def test_an_audit_that_does_not_list_everything_says_so_and_judges_it_all(
    database: Database, commits: Commits, job: Job, jobs: Jobs
) -> None:
    wrong = epoch(0, hash_sum=1)
    listed = [epoch(number) for number in range(1, 5)]
    made = [commit(step) for step in (5, 10, 15)]
    write(database, job, commits=made, epochs=[wrong, *listed])
    write(database, submit(jobs, "other"), commits=made, epochs=[epoch(0)])
    found = commits.audit(job.job_id, 2)
    assert (found.epochs, found.epochs_omitted) == (listed[-2:], 3)
    assert (found.commits, found.commits_omitted) == (made[-2:], 1)
    assert (found.exact, found.inexact) == (4, 1)


EPOCHS = [
    ("read exactly once", {}, True),
    ("nothing read yet", {"samples": 0, "hash_sum": 0}, None),
    ("still being read", {"samples": 99, "hash_sum": 7}, None),
    ("something else read", {"hash_sum": 2**63 + 1}, False),
    ("one read twice", {"samples": 101, "hash_sum": 5}, False),
    ("as many zeros read twice", {"samples": 101}, False),
]


@pytest.mark.parametrize("judged", EPOCHS, ids=[e[0] for e in EPOCHS])
def test_an_epoch_is_judged_alike_by_its_record_and_by_the_database(
    database: Database, commits: Commits, job: Job, judged: tuple[str, dict[str, int], bool | None]
) -> None:
    _, read, verdict = judged
    record = epoch(3, **read)
    write(database, job, epochs=[record])
    found = commits.audit(job.job_id, 5)
    assert record.exactly_once is verdict
    assert (found.epochs, found.exact, found.inexact) == (
        [record],
        int(verdict is True),
        int(verdict is False),
    )


def test_the_verdict_is_on_every_epoch_though_only_the_last_are_shown(
    database: Database, commits: Commits, job: Job
) -> None:
    epochs = [epoch(number, hash_sum=2**63 + (number == 4)) for number in range(20)]
    write(database, job, commits=[commit(step) for step in range(20)], epochs=epochs)
    write(database, job, epochs=[epoch(19, samples=1)])
    found = commits.audit(job.job_id, 3)
    assert [record.epoch for record in found.epochs] == [17, 18, 19]
    assert all(earlier.step < later.step for earlier, later in pairwise(found.commits))
    assert (found.exact, found.inexact) == (18, 1)


def test_a_job_that_has_committed_nothing_has_an_empty_audit(commits: Commits, job: Job) -> None:
    assert commits.audit(job.job_id, 9) == Audit(commits=[], epochs=[], exact=0, inexact=0)
