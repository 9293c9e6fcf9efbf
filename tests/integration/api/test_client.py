"""The Python client against a real service."""

import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice

import httpx
import pytest

from muster import Client
from muster.client import (
    Ambiguous,
    Conflict,
    Invalid,
    NotFound,
    Unreachable,
    WaitTimedOut,
)
from muster.contracts.job.status import JobStatus
from tests.support.api_service import Agent, Service, StandIn
from tests.support.database_samples import attempt, commit, epoch, member, worker


@pytest.fixture
def muster(service: Service) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client


def test_a_job_is_submitted_read_and_deleted(muster: Client, stand_in: StandIn, name: str) -> None:
    job = muster.submit({"job_id": name}, mode="independent", world_size=2)
    assert (job.id, job.status, job.view.world_size) == (name, "QUEUED", 2)
    stand_in.run(name, worker(0, step=7), worker(1))
    assert job.refresh().status == "RUNNING"
    assert [one.step for one in job.summary().workers] == [7, worker(1).progress.step]
    assert [event.message for event in job.events()]
    with pytest.raises(Conflict, match="stop it first"):
        job.delete()
    assert job.stop(grace_seconds=1).view.stop_requested
    stand_in.end(name)
    assert job.delete().deleted
    with pytest.raises(NotFound, match="there is no job"):
        job.refresh()


def test_pool_views_are_typed(muster: Client, stand_in: StandIn, elastic: str) -> None:
    job = muster.job(elastic)
    stand_in.write(
        elastic,
        members=[member(0)],
        commits=[commit(5)],
        epochs=[epoch(0)],
        attempts=[attempt(0, 0), attempt(0, 1)],
    )
    assert [one.worker_id for one in job.workers().workers] == ["0"]
    assert [one.step for one in job.audit().checkpoints] == [5]
    assert len(list(job.attempts())) == 2
    assert job.scale(6).view.world_size == 6
    assert job.pause().view.pause_requested
    assert not job.resume().view.pause_requested


def test_an_invalid_field_is_refused_with_its_place(muster: Client) -> None:
    with pytest.raises(Invalid, match=r"world_siz: .*did you mean 'world_size'") as caught:
        muster.submit(world_siz=4)
    problem = caught.value
    assert (problem.status, problem.type) == (422, "/problems/invalid-request")
    assert [error.loc for error in problem.errors] == [("body", "world_siz")]
    assert problem.request_id


def test_a_job_is_found_by_id_prefix_name_or_latest(muster: Client, name: str) -> None:
    first = muster.submit(job_id=f"{name[:40]}-a", name=name)
    second = muster.submit(job_id=f"{name[:40]}-b")
    assert muster.job(f"{name[:40]}-a").id == first.id
    assert muster.job(name).id == first.id
    assert muster.job("@latest").id == second.id
    with pytest.raises(Ambiguous) as caught:
        muster.job(name[:40])
    assert set(caught.value.job_ids) == {first.id, second.id}
    with pytest.raises(NotFound, match=f"did you mean '{name}'"):
        muster.job(f"{name}/")
    for nearly in ("latest", "@last"):
        with pytest.raises(NotFound, match="did you mean '@latest'"):
            muster.job(nearly)


@pytest.mark.parametrize("word", ["purge", "summaries"])
def test_reserved_paths_are_not_jobs(muster: Client, word: str) -> None:
    with pytest.raises(NotFound, match=f"there is no job '{word}'"):
        muster.job(word)


def test_pages_are_followed(muster: Client, job: str, stand_in: StandIn, name: str) -> None:
    for letter in "abc":
        muster.submit(job_id=f"{name[:40]}-{letter}")
    with httpx.Client(base_url=muster.url) as plain:
        every = [one["job_id"] for one in plain.get("/jobs").json()["jobs"]]
    assert [one.id for one in muster.jobs()] == every
    assert [one.id for one in muster.jobs(limit=2)] == every[:2]
    stand_in.run(job)
    assert job in [one.id for one in muster.jobs(status="RUNNING")]
    assert job not in [one.id for one in muster.jobs(status=["QUEUED", "FAILED"])]


def test_a_wait_ends_with_the_job_or_the_timeout(
    muster: Client, stand_in: StandIn, job: str
) -> None:
    waiting = muster.job(job)
    with pytest.raises(WaitTimedOut, match=r"is QUEUED after 0\.1 s of waiting: it goes on"):
        waiting.wait(timeout_seconds=0.1)
    stand_in.run(job)
    assert waiting.wait(until="running").status == "RUNNING"
    stand_in.move(job, JobStatus.COMPLETED)
    assert waiting.wait(timeout_seconds=60).status == "COMPLETED"


def test_a_wait_times_out_although_the_api_is_gone(
    muster: Client, service: Service, job: str
) -> None:
    waiting = muster.job(job)
    service.end(signal.SIGKILL)
    with pytest.raises(WaitTimedOut, match=r"was QUEUED when last seen") as caught:
        waiting.wait(timeout_seconds=0.5, progress=True)
    assert isinstance(caught.value.lost, Unreachable)
    service.start()
    assert waiting.refresh().status == "QUEUED"


def test_log_lines_are_typed(muster: Client, agent: Agent, job: str) -> None:
    agent.write(job, 0, "a\nb\n", at_micros=1_000_000)
    agent.write(job, 1, "c\n")
    [line] = muster.job(job).logs(rank=0, tail=1)
    assert (line.rank, line.line, line.time and line.time.timestamp()) == (0, "b", 1.0)
    assert {line.line for line in muster.job(job).logs()} == {"a", "b", "c"}


def test_logs_are_followed_across_a_killed_api(
    muster: Client, service: Service, stand_in: StandIn, agent: Agent, job: str
) -> None:
    stand_in.run(job, worker(0), worker(1))
    written = [f"line {number} \x0b \u2028 [rank 7] of its own" for number in range(30)]
    agent.write(job, 1, "".join(f"{line}\n" for line in written[:10]))
    following = muster.job(job).logs(follow=True)
    seen = list(islice(following, 10))
    service.end(signal.SIGKILL)
    agent.write(job, 1, "".join(f"{line}\n" for line in written[10:20]))
    service.start()
    seen += islice(following, 10)
    agent.write(job, 1, "".join(f"{line}\n" for line in written[20:]))
    stand_in.move(job, JobStatus.COMPLETED)
    seen += following
    assert [(line.rank, line.line) for line in seen] == [(1, line) for line in written]
    assert not list(muster.job(job).logs(follow=True, tail=0))


def test_events_are_followed(muster: Client, stand_in: StandIn, job: str) -> None:
    first, *_ = muster.job(job).events()
    assert muster.job(job).events(after=0)[0] == first
    assert first not in muster.job(job).events(after=first.event_id)
    following = muster.job(job).follow_events()
    assert next(following).kind == "submitted"
    stand_in.move(job, JobStatus.STARTING, JobStatus.RUNNING, JobStatus.COMPLETED)
    rest = [event.message for event in following]
    assert rest == [event.message for event in muster.job(job).events()][1:]
    assert list(muster.job(job).follow_events(1)) == muster.job(job).events()[-1:]
    with pytest.raises(ValueError, match="carries no times"):
        muster.job(job).logs(since=datetime(2026, 1, 1, tzinfo=UTC), follow=True)
