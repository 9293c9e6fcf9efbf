"""Event streams over a real socket have no gap and no repetition."""

import json

import httpx

from database.records import RankRecord
from muster.contracts.job.status import JobStatus
from muster.contracts.rank import ProcessState
from tests.support.api_service import Agent, StandIn
from tests.support.log_follower import Event, events


def everything(
    client: httpx.Client, path: str, params: dict[str, int] | None = None
) -> list[Event]:
    with client.stream("GET", path, params=params) as response:
        assert response.status_code == 200
        return list(events(response.iter_raw()))


def lines(found: list[Event]) -> list[str]:
    return [line for event in found if not event.kind for line in event.data]


def test_history_then_live_lines_then_the_end(
    client: httpx.Client, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "old 0\n")
    stand_in.run(job)
    with client.stream("GET", f"/jobs/{job}/logs/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-accel-buffering"] == "no"
        stream = events(response.iter_raw())
        assert next(stream).data == ["[rank 0] old 0"]
        agent.write(job, 1, "live 1\n")
        assert next(stream).data == ["[rank 1] live 1"]
        agent.write(job, 0, "unfinished")
        stand_in.move(job, JobStatus.COMPLETED)
        assert next(stream).data == ["[rank 0] unfinished"]
        end = next(stream)
        assert end.kind == "end"
        assert json.loads(end.data[0])["status"] == "COMPLETED"
        assert next(stream, None) is None


def test_a_complete_reader_gets_204(
    client: httpx.Client, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "one\ntwo\n")
    stand_in.run(job)
    stand_in.move(job, JobStatus.COMPLETED)
    found = everything(client, f"/jobs/{job}/logs/stream")
    assert lines(found) == ["[rank 0] one", "[rank 0] two"]
    answers = [
        client.get(f"/jobs/{job}/logs/stream", headers={"Last-Event-ID": found[-1].id}),
        client.get(f"/jobs/{job}/logs/stream", params={"after": found[-2].id}),
    ]
    assert [answer.status_code for answer in answers] == [204, 204]


def test_a_job_without_lines_ends_with_204(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.move(job, JobStatus.STOPPED)
    (end,) = everything(client, f"/jobs/{job}/logs/stream")
    assert end.id
    again = client.get(f"/jobs/{job}/logs/stream", headers={"Last-Event-ID": end.id})
    assert again.status_code == 204


def test_a_stream_starts_with_its_position(
    client: httpx.Client, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "old\n")
    stand_in.run(job)
    path = f"/jobs/{job}/logs/stream"
    with client.stream("GET", path, params={"tail": 0}) as response:
        started = next(line for line in response.iter_lines() if line.startswith("id: "))
    agent.write(job, 0, "without a reader\n")
    stand_in.move(job, JobStatus.COMPLETED)
    with client.stream("GET", path, params={"after": started.removeprefix("id: ")}) as response:
        assert lines(list(events(response.iter_raw()))) == ["[rank 0] without a reader"]


def test_an_exited_rank_ends_its_unfinished_line(
    client: httpx.Client, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "dying wor")
    exited = RankRecord(rank=0, attempt=0, state=ProcessState.EXITED, process=None)
    stand_in.run(job, exited)
    with client.stream("GET", f"/jobs/{job}/logs/stream") as response:
        stream = events(response.iter_raw())
        assert next(stream).data == ["[rank 0] dying wor"]
        agent.write(job, 0, "reborn\n", attempt=1)
        assert next(stream).data == ["[rank 0] reborn"]


def test_the_stream_of_a_deleted_job_ends(
    client: httpx.Client, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "here\n")
    stand_in.run(job)
    with client.stream("GET", f"/jobs/{job}/logs/stream") as response:
        stream = events(response.iter_raw())
        assert next(stream).data == ["[rank 0] here"]
        stand_in.move(job, JobStatus.FAILED)
        client.delete(f"/jobs/{job}").raise_for_status()
        assert next(event for event in stream if event.kind).kind == "end"


def test_a_position_of_an_earlier_job_is_refused(
    client: httpx.Client, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "of the first job\n")
    stand_in.move(job, JobStatus.FAILED)
    seen = everything(client, f"/jobs/{job}/logs/stream")[-1].id
    client.delete(f"/jobs/{job}").raise_for_status()
    client.post("/jobs", json={"job_id": job, "mode": "independent"}).raise_for_status()
    agent.write(job, 0, "of the second job\n")
    stand_in.move(job, JobStatus.FAILED)
    refused = [
        client.get(f"/jobs/{job}/logs/stream", headers={"Last-Event-ID": seen}),
        client.get(f"/jobs/{job}/logs", params={"after": seen}),
    ]
    assert [answer.json()["type"] for answer in refused] == [
        "/problems/position-of-another-job"
    ] * 2
    found = everything(client, f"/jobs/{job}/logs/stream")
    assert lines(found) == ["[rank 0] of the second job"]
