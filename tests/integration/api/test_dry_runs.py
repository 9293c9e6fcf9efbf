"""Dry runs of POST /jobs and of a purge: the result is shown, nothing changes."""

import httpx
import pytest

from muster.contracts.job import JobStatus
from tests.integration.api.service import Agent, Service, StandIn


def total(client: httpx.Client) -> str:
    return client.get("/jobs?limit=1").headers["x-total-count"]


@pytest.mark.parametrize(
    ("job", "shards", "per_rank"),
    [
        ({"mode": "independent", "world_size": 3}, 8, [3, 3, 2]),
        ({"world_size": 3}, 32, [11, 11, 10]),
        ({"world_size": 2, "command": ["python", "-c", "pass"]}, None, None),
    ],
)
def test_a_plan_shows_the_job_and_stores_nothing(
    client: httpx.Client, job: dict[str, object], shards: int | None, per_rank: list[int] | None
) -> None:
    before = total(client)
    answer = client.post("/jobs?dry_run=true", json=job, headers={"Idempotency-Key": "dry"})
    plan = answer.json()
    assert (answer.status_code, plan["launcher"]) == (200, "local")
    assert (plan["shards"], plan["shards_per_rank"]) == (shards, per_rank)
    assert (plan["world_size"], plan["command"]) == (job["world_size"], job.get("command"))
    assert plan["spec"]["checkpoint_dir"].startswith("/")
    assert total(client) == before
    assert client.get(f"/jobs/{plan['job_id']}").status_code == 404


def test_a_plan_counts_the_shards_of_the_data_set(service: Service, client: httpx.Client) -> None:
    data = service.root / "own"
    data.mkdir()
    for number in range(5):
        (data / f"shard_{number:05d}.txt").write_text("line\n")
    job = {"mode": "independent", "world_size": 2, "dataset_dir": "own"}
    plan = client.post("/jobs?dry_run=true", json=job).json()
    assert (plan["spec"]["dataset_dir"], plan["shards_per_rank"]) == (str(data), [3, 2])


def test_a_dry_run_refuses_what_a_submission_would(
    service: Service, client: httpx.Client, job: str
) -> None:
    (service.root / "empty").mkdir()
    bodies = [{"job_id": job}, {"dataset_dir": "empty"}, {"wrold_size": 4}, {"job_id": "purge"}]
    answers = [client.post("/jobs?dry_run=true", json=body) for body in bodies]
    assert [answer.status_code for answer in answers] == [409, 422, 422, 422]
    assert answers[1].json()["errors"][0]["loc"] == ["body", "dataset_dir"]


def test_a_dry_purge_foresees_the_freed_bytes(
    client: httpx.Client, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "x" * 1000)
    stand_in.move(job, JobStatus.STOPPED)
    params = {"statuses": "STOPPED", "dry_run": "true"}
    foreseen = client.post("/jobs/purge", params=params).json()
    assert job in foreseen["job_ids"]
    assert (foreseen["deleted"], foreseen["matched"]) == (0, len(foreseen["job_ids"]))
    assert client.get(f"/jobs/{job}").json()["status"] == "STOPPED"
    kept = client.post("/jobs/purge", params=params | {"delete_logs": "false"}).json()
    assert (kept["job_ids"], kept["freed_bytes"]) == (foreseen["job_ids"], 0)
    done = client.post("/jobs/purge", params=params | {"dry_run": "false"}).json()
    assert done == foreseen | {"deleted": foreseen["matched"]}
    assert done["freed_bytes"] >= 1000
    assert client.get(f"/jobs/{job}").status_code == 404


def test_a_dry_purge_lists_running_jobs_only_if_stopped(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.run(job)
    params = {"statuses": "RUNNING", "dry_run": "true"}
    skipped = client.post("/jobs/purge", params=params).json()
    assert (skipped["job_ids"], skipped["skipped"]) == ([], [job])
    stopped = client.post("/jobs/purge", params=params | {"stop_running": "true"}).json()
    assert (stopped["job_ids"], stopped["skipped"]) == ([job], [])
    assert client.get(f"/jobs/{job}").json()["stop_requested"] is False
