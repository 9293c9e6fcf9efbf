"""Event streams over a real socket: nothing is missed and nothing comes twice."""

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from muster.contracts.job import JobStatus
from muster.contracts.rank import ProcessState
from store.records import Worker


@dataclass
class Event:
    id: str = ""
    kind: str = ""
    data: list[str] = field(default_factory=list)


def events(response: httpx.Response) -> Iterator[Event]:
    """Parse a stream as a browser does: an event without data is none."""
    event = Event()
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if not line:
            if event.data:
                yield event
            event = Event()
        elif name == "data":
            event.data.append(value)
        elif name == "id":
            event.id = value
        elif name == "event":
            event.kind = value


def everything(client, path, **options):
    with client.stream("GET", path, **options) as response:
        assert response.status_code == 200
        return list(events(response))


def lines(found):
    return [line for event in found if not event.kind for line in event.data]


@pytest.fixture
def job(client):
    client.post("/jobs", json={"job_id": "a", "world_size": 2}).raise_for_status()
    return "a"


def test_history_then_live_lines_then_the_end(service, client, stand_in, write, job):
    write(job, 0, "old 0\n")
    stand_in.run(job)
    with client.stream("GET", f"/jobs/{job}/logs/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-accel-buffering"] == "no"
        stream = events(response)
        assert next(stream).data == ["[rank 0] old 0"]
        write(job, 1, "live 1\n")
        assert next(stream).data == ["[rank 1] live 1"]
        write(job, 0, "unfinished")
        stand_in.move(job, JobStatus.COMPLETED)
        assert next(stream).data == ["[rank 0] unfinished"]
        end = next(stream)
        assert end.kind == "end"
        assert json.loads(end.data[0])["status"] == "COMPLETED"
        assert next(stream, None) is None


def test_a_reader_who_has_seen_everything_is_told_not_to_come_back(client, stand_in, write, job):
    write(job, 0, "one\ntwo\n")
    stand_in.run(job)
    stand_in.move(job, JobStatus.COMPLETED)
    found = everything(client, f"/jobs/{job}/logs/stream")
    assert lines(found) == ["[rank 0] one", "[rank 0] two"]
    answers = [
        client.get(f"/jobs/{job}/logs/stream", headers={"Last-Event-ID": found[-1].id}),
        client.get(f"/jobs/{job}/logs/stream", params={"after": found[-2].id}),
    ]
    assert [answer.status_code for answer in answers] == [204, 204]


def test_a_job_without_a_line_ends_and_is_not_asked_again(client, stand_in, job):
    stand_in.move(job, JobStatus.STOPPED)
    (end,) = everything(client, f"/jobs/{job}/logs/stream")
    assert end.id
    again = client.get(f"/jobs/{job}/logs/stream", headers={"Last-Event-ID": end.id})
    assert again.status_code == 204


def test_one_rank_alone_has_no_prefix(client, stand_in, write, job):
    write(job, 0, "zero\n")
    write(job, 1, "one\n")
    stand_in.move(job, JobStatus.STOPPED)
    found = everything(client, f"/jobs/{job}/logs/stream", params={"rank": 1})
    assert lines(found) == ["one"]


def test_a_tail_begins_near_the_end(client, stand_in, write, job):
    write(job, 0, "0\n1\n2\n3\n", at_micros=1)
    write(job, 1, "never\n", at_micros=0)
    stand_in.move(job, JobStatus.STOPPED)
    found = everything(client, f"/jobs/{job}/logs/stream", params={"tail": 2})
    assert lines(found) == ["[rank 0] 2", "[rank 0] 3"]


def test_history_is_in_the_order_of_time_across_ranks_and_incarnations(
    client, stand_in, write, job
):
    write(job, 0, "first\n", at_micros=10)
    write(job, 1, "second\n", at_micros=20)
    write(job, 0, "third\n", at_micros=30, incarnation=1)
    write(job, 1, "fourth\n", at_micros=40)
    stand_in.move(job, JobStatus.STOPPED)
    expected = ["[rank 0] first", "[rank 1] second", "[rank 0] third", "[rank 1] fourth"]
    assert lines(everything(client, f"/jobs/{job}/logs/stream")) == expected
    tail = client.get(f"/jobs/{job}/logs", headers={"Accept": "text/plain"})
    assert tail.text.splitlines() == expected


def test_an_ended_incarnation_gives_up_its_unfinished_line(client, stand_in, write, job):
    write(job, 0, "dying wor")
    exited = Worker(rank=0, incarnation=0, state=ProcessState.EXITED, process=None)
    stand_in.run(job, exited)
    with client.stream("GET", f"/jobs/{job}/logs/stream") as response:
        stream = events(response)
        assert next(stream).data == ["[rank 0] dying wor"]
        write(job, 0, "reborn\n", incarnation=1)
        assert next(stream).data == ["[rank 0] reborn"]


def test_a_carriage_return_ends_no_line(client, stand_in, write, job):
    write(job, 0, "10%\r20%\r\n")
    stand_in.move(job, JobStatus.STOPPED)
    assert lines(everything(client, f"/jobs/{job}/logs/stream")) == ["[rank 0] 10%\\r20%"]


def test_the_stream_of_a_deleted_job_ends(client, stand_in, write, job):
    write(job, 0, "here\n")
    stand_in.run(job)
    with client.stream("GET", f"/jobs/{job}/logs/stream") as response:
        stream = events(response)
        assert next(stream).data == ["[rank 0] here"]
        stand_in.move(job, JobStatus.FAILED)
        client.delete(f"/jobs/{job}").raise_for_status()
        assert next(event for event in stream if event.kind).kind == "end"


@pytest.mark.parametrize("text", ["x", "0:1", "0.0:-1", "0.0:1,0.0:2", "0.0:1,", "9" * 30])
def test_what_is_no_position_is_refused(client, job, text):
    stream = f"/jobs/{job}/logs/stream"
    refused = [
        client.get(stream, params={"after": text}),
        client.get(stream, headers={"Last-Event-ID": text}),
    ]
    assert [answer.status_code for answer in refused] == [422, 422]


def test_killing_the_service_leaves_neither_gap_nor_repeat(service, client, stand_in, write, job):
    """A writer goes on while the service is killed twice; one reader resumes by its last id."""
    count = 3000
    stand_in.run(job)
    killed = threading.Event()

    def writing() -> None:
        for number in range(count):
            write(job, number % 2, f"{number}\n")
            if number in {count // 3, 2 * count // 3}:
                killed.wait(20)
                killed.clear()
        stand_in.move(job, JobStatus.COMPLETED)

    writer = threading.Thread(target=writing)
    writer.start()
    seen: list[str] = []
    last = ""
    ended = False
    while not ended:
        headers = {"Last-Event-ID": last} if last else {}
        with client.stream("GET", f"/jobs/{job}/logs/stream", headers=headers) as response:
            try:
                for event in events(response):
                    ended = ended or event.kind == "end"
                    if not event.kind:
                        seen += event.data
                        last = event.id
                    if len(seen) > count // 3 and killed is not None and _due(seen, count):
                        service.end(signal.SIGKILL)
                        break
            except httpx.HTTPError:
                pass
        if service.process is None:
            service.start()
            killed.set()
    writer.join()
    ranks = [[int(line.split()[-1]) for line in seen if f"rank {rank}]" in line] for rank in (0, 1)]
    assert ranks == [list(range(0, count, 2)), list(range(1, count, 2))]


def _due(seen, count, _done=set()):  # noqa: B006  remembers which kills were done
    third = len(seen) * 3 // count
    if third in {1, 2} and third not in _done:
        _done.add(third)
        return True
    return False
