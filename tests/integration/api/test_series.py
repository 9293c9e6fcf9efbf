"""The series of a job over HTTP."""

import json

import httpx

from database.history import NEWEST
from muster import Client
from muster.contracts.job.status import JobStatus
from muster.contracts.series import LIVE_KEPT, SERIES_LIMIT
from muster.contracts.views.history import SeriesList
from tests.support.api_service import Service, StandIn
from tests.support.database_samples import points
from tests.support.log_follower import events


def test_series_are_columns_of_points(client: httpx.Client, stand_in: StandIn, job: str) -> None:
    stand_in.run(job)
    gone_back = points(0.25, since=1, second=5)
    stand_in.write(job, series=[*points(3.0, 1.0, 2.0), *gone_back, *points(0.5, name="lr")])
    found = client.get(f"/jobs/{job}/series", params={"names": "loss,none"}).json()
    assert (found["names"], list(found["series"])) == (["loss", "lr"], ["loss"])
    live, abandoned = found["series"]["loss"]["live"], found["series"]["loss"]["abandoned"]
    assert (live["step"], live["last"], live["count"]) == ([1, 2], [3.0, 0.25], [1, 1])
    assert (abandoned["step"], abandoned["last"]) == ([2, 3], [1.0, 2.0])
    first, last = live["seconds"]
    assert last - first == 5


def test_points_are_merged_to_the_number_asked_for(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.run(job)
    stand_in.write(job, series=points(3.0, 1.0, 2.0))
    live = client.get(f"/jobs/{job}/series?points=1").json()["series"]["loss"]["live"]
    live.pop("seconds")
    assert live == {
        "step": [3], "first": [3.0], "least": [1.0], "greatest": [3.0], "last": [2.0],
        "count": [3], "not_finite": [0],
    }  # fmt: skip


def test_a_long_series_is_limited_in_the_database(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.run(job)
    values = [float(step == 77) for step in range(SERIES_LIMIT + 1)]
    stand_in.write(job, series=points(*values), series_due=frozenset({"loss"}))
    live = client.get(f"/jobs/{job}/series?points=2048").json()["series"]["loss"]["live"]
    assert LIVE_KEPT <= len(live["step"]) <= LIVE_KEPT + NEWEST
    assert (sum(live["count"]), max(live["greatest"])) == (SERIES_LIMIT + 1, 1.0)


def test_a_name_that_no_database_can_hold_is_unknown(client: httpx.Client, job: str) -> None:
    answer = client.get(f"/jobs/{job}/series", params={"names": "a\0b"})
    assert (answer.status_code, answer.json()["series"]) == (200, {})


def test_a_client_returns_the_series(service: Service, stand_in: StandIn, job: str) -> None:
    stand_in.run(job)
    stand_in.write(job, series=[*points(1.0), *points(0.5, name="lr")])
    with Client(service.url) as client:
        found = client.job(job).series("lr")
    assert isinstance(found, SeriesList)
    assert found.series["lr"].live.last == [0.5]


def test_new_points_come_to_those_who_watch(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.run(job)
    stand_in.write(job, series=points(9.0))
    with client.stream("GET", f"/jobs/{job}/watch") as response:
        stream = events(response.iter_raw())
        assert next(stream).kind == "summary"
        news = points(0.5, 0.25, since=1, second=1)
        stand_in.write(job, series=[*news, *points(0.1, name="lr", since=1, second=1)])
        stand_in.move(job, JobStatus.COMPLETED)
        found = [json.loads(it.data[0]) for it in stream if it.kind == "point"]
    assert [{name: point["last"] for name, point in it.items()} for it in found] == [
        {"loss": 0.5, "lr": 0.1},
        {"loss": 0.25},
    ]


def test_series_are_deleted_with_their_job(
    client: httpx.Client, stand_in: StandIn, name: str
) -> None:
    for content in (points(1.0), []):
        client.post("/jobs", json={"job_id": name}).raise_for_status()
        stand_in.write(name, series=content)
        assert bool(client.get(f"/jobs/{name}/series").json()["names"]) == bool(content)
        stand_in.end(name)
        client.delete(f"/jobs/{name}").raise_for_status()
