"""Lists of jobs and attempts: filters, order, pages, conditional requests."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest

from tests.support.api_service import StandIn
from tests.support.database_samples import NOON, attempt

LISTS = ("/jobs", "/jobs/summaries")


@pytest.fixture
def three(client: httpx.Client, stand_in: StandIn, name: str) -> Iterator[list[dict[str, Any]]]:
    """Three jobs of one label, the oldest first; the last one has a name."""
    labels = {"group": name}
    bodies: list[dict[str, Any]] = [
        {"labels": labels},
        {"labels": labels | {"team": "vision: a/b"}},
        {"labels": labels, "name": f"{name} & more"},
    ]
    jobs = [client.post("/jobs", json=body).raise_for_status().json() for body in bodies]
    yield jobs
    for job in jobs:
        stand_in.end(job["job_id"])


def ids(answer: httpx.Response) -> list[str]:
    return [job["job_id"] for job in answer.raise_for_status().json()["jobs"]]


@pytest.mark.parametrize("path", LISTS)
def test_every_filter_and_the_order_act_on_both_lists(
    client: httpx.Client, three: list[dict[str, Any]], name: str, path: str
) -> None:
    old, middle, young = [job["job_id"] for job in three]
    group = f"group:{name}"
    table: list[tuple[dict[str, Any], list[str]]] = [
        ({"label": group}, [young, middle, old]),
        ({"label": group, "sort": "created_at"}, [old, middle, young]),
        ({"label": [group, "team:vision: a/b"]}, [middle]),
        ({"name": f"{name} & more"}, [young]),
        ({"name": name}, []),
        ({"label": group, "created_after": three[0]["created_at"]}, [young, middle]),
        ({"label": group, "created_before": three[2]["created_at"]}, [middle, old]),
        ({"label": group, "status": "RUNNING"}, []),
        ({"label": group, "status": ["RUNNING", "queued"]}, [young, middle, old]),
    ]
    for params, wanted in table:
        answer = client.get(path, params=params)
        assert ids(answer) == wanted, params
        assert answer.headers["x-total-count"] == str(len(wanted))


def test_the_next_page_has_the_same_filters(
    client: httpx.Client, three: list[dict[str, Any]], name: str
) -> None:
    found = []
    path = f"/jobs?label=group:{name}&sort=created_at&limit=1"
    while path:
        answer = client.get(path)
        assert answer.headers["x-total-count"] == "3"
        found += ids(answer)
        path = answer.links.get("next", {}).get("url")
    assert found == [job["job_id"] for job in three]


def test_an_unchanged_response_is_not_sent_again(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    for path in (*LISTS, f"/jobs/{job}", f"/jobs/{job}/summary"):
        first = client.get(path)
        known = {"If-None-Match": f'"other", {first.headers["etag"]}'}
        again = client.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b""), path
        assert again.headers["etag"] == first.headers["etag"]
        assert again.headers["cache-control"] == "no-store"
        assert first.headers["etag"].startswith('W/"') is (path != f"/jobs/{job}")
        if path in LISTS:
            assert client.get(f"{path}?limit=1", headers=known).status_code == 200
            assert "x-total-count" in again.headers
    stale = {"If-None-Match": client.get(f"/jobs/{job}").headers["etag"]}
    stand_in.run(job)
    assert client.get(f"/jobs/{job}", headers=stale).json()["status"] == "RUNNING"


def test_if_match_binds_a_change_to_the_known_version(client: httpx.Client, elastic: str) -> None:
    path = f"/jobs/{elastic}"
    seen = client.get(path).headers["etag"]
    changed = client.patch(path, json={"world_size": 5}, headers={"If-Match": seen})
    assert changed.json()["world_size"] == 5
    assert changed.headers["etag"] == client.get(path).headers["etag"] != seen
    refused = client.patch(path, json={"world_size": 6}, headers={"If-Match": seen})
    assert (refused.status_code, refused.json()["type"]) == (412, "/problems/job-changed")
    assert client.get(path).json()["world_size"] == 5


# The attempts of a job

ENDED = {
    "pid": 4711,
    "started_at": NOON,
    "ended_at": NOON + timedelta(seconds=9),
    "exit_code": 1,
    "retry_class": "crash",
    "reason": "worker_exited",
    "message": "exited with code 1 (NameError: x)",
    "step_at_start": 5,
    "step_at_end": 7,
}


def test_an_exit_is_shown_with_all_known_facts(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.write(job, attempts=[attempt(0, 0, **ENDED)])
    assert client.get(f"/jobs/{job}/attempts").json() == {
        "job_id": job,
        "attempts": [
            {
                **ENDED,
                "rank": 0,
                "attempt": 0,
                "exit_signal": None,
                "started_at": "2026-03-01T12:00:00.123457Z",
                "ended_at": "2026-03-01T12:00:09.123457Z",
            }
        ],
    }


def test_pages_lead_from_one_to_the_next(client: httpx.Client, stand_in: StandIn, job: str) -> None:
    # All started in the same moment, as they are.
    stand_in.write(job, attempts=[attempt(rank, 0) for rank in range(5)])
    seen, path = [], f"/jobs/{job}/attempts?limit=2"
    while path:
        answer = client.get(path)
        assert answer.headers["x-total-count"] == "5"
        seen += [one["rank"] for one in answer.json()["attempts"]]
        path = answer.links.get("next", {}).get("url")
    assert seen == [4, 3, 2, 1, 0]
