"""The comparison of the jobs of a sweep, through the API and its client."""

from collections.abc import Iterator

import httpx
import pytest

from muster import Client
from muster.client import NotFound
from muster.contracts.job.status import JobStatus
from tests.support.api_service import Service, StandIn
from tests.support.database_samples import worker


@pytest.fixture
def sweep(client: httpx.Client, stand_in: StandIn, name: str) -> Iterator[str]:
    """Three jobs of one sweep, the last of which has not started."""
    for number, rate in enumerate(["0.1", "0.3", "0.9"]):
        body = {
            "job_id": f"{name}-{number}",
            "world_size": 2,
            "command": ["true", "--lr", rate],
            "env": {"KEY": rate},
            "labels": {"sweep": name},
        }
        client.post("/jobs", json=body).raise_for_status()
    stand_in.run(f"{name}-0", worker(0, step=5, loss=0.1, metrics={"val_loss": 0.5}), worker(1))
    stand_in.run(f"{name}-1", worker(0, step=7, loss=0.2, metrics={"val_loss": 0.4}), worker(1))
    yield name
    for number in range(3):
        stand_in.end(f"{name}-{number}")
        client.delete(f"/jobs/{name}-{number}").raise_for_status()


def test_leaderboard_compares_the_jobs_of_a_sweep(
    client: httpx.Client, service: Service, stand_in: StandIn, sweep: str
) -> None:
    found = client.get("/leaderboard", params={"sweep": sweep}).raise_for_status().json()
    assert (found["sweep"], found["loss_kind"], found["best"]) == (
        sweep,
        "validation",
        f"{sweep}-1",
    )
    assert found["jobs"][0] == {
        "job_id": f"{sweep}-1",
        "status": "RUNNING",
        "loss": 0.4,
        "step": 7,
        "total_steps": None,
        "differences": {"--lr": "0.3", "env.KEY": "0.3"},
    }
    assert [job["loss"] for job in found["jobs"]] == [0.4, 0.5, None]
    with Client(service.url) as muster:
        assert muster.leaderboard().best == f"{sweep}-1"  # it is the only one
        stand_in.move(f"{sweep}-1", JobStatus.STOPPING, JobStatus.FAILED)
        failed = muster.leaderboard(sweep)
        assert (failed.best, failed.jobs[0].job_id) == (f"{sweep}-0", f"{sweep}-1")


def test_leaderboard_names_the_sweeps_to_choose_from(
    client: httpx.Client, service: Service, stand_in: StandIn, sweep: str
) -> None:
    body = {"job_id": f"{sweep}-3", "labels": {"sweep": "it's new"}}
    client.post("/jobs", json=body).raise_for_status()
    wanted = "there is no sweep 'unknown'; "
    wanted += f"name one of these sweeps (muster leaderboard NAME): it's new, {sweep}"
    with Client(service.url) as muster:
        assert (muster.leaderboard().sweep, muster.leaderboard().jobs) == (None, [])
        assert muster.leaderboard().sweeps == ["it's new", sweep]
        with pytest.raises(NotFound) as refused:
            muster.leaderboard("unknown")
        assert str(refused.value) == wanted
    stand_in.end(f"{sweep}-3")
    client.delete(f"/jobs/{sweep}-3").raise_for_status()


def test_leaderboard_without_a_sweep_says_how_to_make_one(client: httpx.Client) -> None:
    assert client.get("/leaderboard").json()["sweep"] is None
    missing = client.get("/leaderboard?sweep=lr")
    assert (missing.status_code, missing.json()["type"]) == (404, "/problems/sweep-not-found")
    assert "muster submit --label sweep=" in missing.json()["detail"]
    assert client.get("/leaderboard?swep=lr").status_code == 422
    assert client.get("/leaderboard?sweep=%00").status_code == 404
