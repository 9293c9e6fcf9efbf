"""A request sent twice has one effect."""

from datetime import timedelta

import pytest
from store_samples import (
    SteppingClock,
    everything,
    finish,
    idempotency_key,
    nothing_moves,
    submit,
)

from muster.contracts.job import JobId, JobUid
from muster.contracts.spec import JobSpec
from store.database import Database
from store.errors import IdempotencyConflict, JobExists
from store.idempotency import KEPT, Answers
from store.jobs import Jobs


def test_a_replay_gets_the_first_answer_whatever_became_of_the_job(
    database: Database, jobs: Jobs
) -> None:
    first = submit(jobs, "a", key="k")
    finish(database, first)
    with nothing_moves(database):
        assert submit(jobs, "b", key="k") == first
    jobs.delete(first.job_id, first.uid)
    assert submit(jobs, "c", key="k") == first
    assert everything(database)["jobs"] == []


def test_an_answer_holds_no_environment_once_its_job_is_deleted(
    database: Database, jobs: Jobs
) -> None:
    spec = JobSpec(name="kept", env={"KEY": "hunter2"})
    key = idempotency_key("k")
    first = jobs.create(JobId("a"), JobUid("u"), spec, message=None, idempotency=key)
    finish(database, first)
    answers = Answers(database, lambda: first.created_at)
    assert answers.find(key) == first
    jobs.delete(first.job_id, first.uid)
    assert "hunter2" not in str(everything(database))
    jobs.create(JobId("a"), JobUid("another"), spec, message=None, idempotency=None)
    replayed = answers.find(key)
    assert replayed is not None
    assert (replayed.uid, replayed.spec.name, replayed.spec.env) == ("u", "kept", {})


def test_a_replay_that_repeats_the_id_is_no_conflict_with_itself(jobs: Jobs) -> None:
    assert submit(jobs, "a", key="k") == submit(jobs, "a", key="k")


def test_another_body_under_the_same_key_is_refused(database: Database, jobs: Jobs) -> None:
    first = submit(jobs, "a", key="k")
    other = idempotency_key("k", body="another body")
    with nothing_moves(database), pytest.raises(IdempotencyConflict, match="'k' was used"):
        jobs.create(JobId("b"), first.uid, first.spec, message=None, idempotency=other)
    with pytest.raises(IdempotencyConflict):
        Answers(database, lambda: first.created_at).find(other)


def test_two_people_may_use_the_same_key(database: Database, jobs: Jobs) -> None:
    first = submit(jobs, "a", key="k")
    answers = Answers(database, lambda: first.created_at)
    assert answers.find(idempotency_key("k")) == first
    assert answers.find(idempotency_key("k", principal="bob")) is None


def test_a_refused_job_leaves_no_answer(database: Database, jobs: Jobs) -> None:
    submit(jobs, "a")
    with nothing_moves(database), pytest.raises(JobExists):
        submit(jobs, "a", uid="other", key="k")


def test_an_answer_is_forgotten_after_a_day(
    database: Database, jobs: Jobs, clock: SteppingClock
) -> None:
    submit(jobs, "a", key="k")
    clock.now += KEPT - timedelta(seconds=2)
    assert submit(jobs, "b", key="k").job_id == "a"
    clock.now += timedelta(seconds=2)
    assert submit(jobs, "b", key="k").job_id == "b"
    assert len(everything(database)["answers"]) == 1
