"""A request sent twice has one effect."""

from datetime import timedelta

import pytest

from database.engine import Database
from database.errors import IdempotencyConflict, JobExists
from database.idempotency import RETENTION, Answers
from database.jobs import Jobs, NewJob
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobUid
from tests.support.database_samples import (
    SteppingClock,
    everything,
    finish,
    idempotency_key,
    nothing_moves,
    store,
    submit,
)


def test_a_repeated_request_returns_the_original_response(database: Database, jobs: Jobs) -> None:
    first = submit(jobs, "a", key="k")
    finish(database, first)
    with nothing_moves(database):
        assert submit(jobs, "a", key="k") == submit(jobs, "b", key="k") == first
    jobs.delete(first.job_id, first.uid)
    assert submit(jobs, "c", key="k") == first
    assert everything(database)["jobs"] == []


def test_the_response_of_a_deleted_job_has_no_environment(database: Database, jobs: Jobs) -> None:
    spec = JobSpec(name="kept", env={"KEY": "hunter2"})
    key = idempotency_key("k")
    first = store(jobs, NewJob(JobId("a"), JobUid("u"), spec, idempotency=key))
    finish(database, first)
    answers = Answers(database, lambda: first.created_at)
    assert answers.find(key) == first
    jobs.delete(first.job_id, first.uid)
    assert "hunter2" not in str(everything(database))
    store(jobs, NewJob(JobId("a"), JobUid("another"), spec))
    replayed = answers.find(key)
    assert replayed is not None
    assert (replayed.uid, replayed.spec.name, replayed.spec.env) == ("u", "kept", {})


def test_a_key_with_another_body_is_refused(database: Database, jobs: Jobs) -> None:
    first = submit(jobs, "a", key="k")
    other = idempotency_key("k", body="another body")
    with nothing_moves(database), pytest.raises(IdempotencyConflict, match="'k' was used"):
        store(jobs, NewJob(JobId("b"), first.uid, first.spec, idempotency=other))
    with pytest.raises(IdempotencyConflict):
        Answers(database, lambda: first.created_at).find(other)


def test_two_callers_may_use_the_same_key(database: Database, jobs: Jobs) -> None:
    first = submit(jobs, "a", key="k")
    answers = Answers(database, lambda: first.created_at)
    assert answers.find(idempotency_key("k")) == first
    assert answers.find(idempotency_key("k", principal="bob")) is None


def test_a_refused_job_stores_no_response(database: Database, jobs: Jobs) -> None:
    submit(jobs, "a")
    with nothing_moves(database), pytest.raises(JobExists):
        submit(jobs, "a", uid="other", key="k")


def test_a_response_expires_after_a_day(
    database: Database, jobs: Jobs, clock: SteppingClock
) -> None:
    submit(jobs, "a", key="k")
    clock.now += RETENTION - timedelta(seconds=2)
    assert submit(jobs, "b", key="k").job_id == "a"
    clock.now += timedelta(seconds=2)
    assert submit(jobs, "b", key="k").job_id == "b"
    assert len(everything(database)["answers"]) == 1
