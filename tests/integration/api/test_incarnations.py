"""The attempts of a job over HTTP: pages, the newest first."""

from datetime import timedelta

import httpx
import pytest

from tests.integration.api.service import StandIn
from tests.support.database_samples import NOON, attempt

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
    stand_in.write(job, incarnations=[attempt(0, 0, **ENDED)])
    assert client.get(f"/jobs/{job}/incarnations").json() == {
        "job_id": job,
        "incarnations": [
            {
                **ENDED,
                "rank": 0,
                "incarnation": 0,
                "exit_signal": None,
                "started_at": "2026-03-01T12:00:00.123457Z",
                "ended_at": "2026-03-01T12:00:09.123457Z",
            }
        ],
    }


def test_pages_lead_from_one_to_the_next(client: httpx.Client, stand_in: StandIn, job: str) -> None:
    # All started in the same moment, as they are.
    stand_in.write(job, incarnations=[attempt(rank, 0) for rank in range(5)])
    seen, path = [], f"/jobs/{job}/incarnations?limit=2"
    while path:
        answer = client.get(path)
        assert answer.headers["x-total-count"] == "5"
        seen += [one["rank"] for one in answer.json()["incarnations"]]
        path = answer.links.get("next", {}).get("url")
    assert seen == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "cursor=x", "cursor=WzEsMl0", "rnak=1"])
def test_an_invalid_page_is_refused(client: httpx.Client, job: str, query: str) -> None:
    assert client.get(f"/jobs/{job}/incarnations?{query}").status_code == 422


def test_a_cursor_of_another_list_is_refused(client: httpx.Client, job: str) -> None:
    cursor = "WyIyMDI2LTAzLTAxVDEyOjAwOjAwWiIsImEiXQ"  # ["2026-03-01T12:00:00Z","a"]
    assert client.get(f"/jobs/{job}/incarnations?cursor={cursor}").status_code == 422


def test_an_unknown_job_has_no_attempts(client: httpx.Client) -> None:
    assert client.get("/jobs/nobody/incarnations").json()["type"] == "/problems/job-not-found"
