"""Submit, plan, show, stop and delete jobs over HTTP."""

import threading

import httpx
import pytest

from muster.contracts.job.status import JobId, JobStatus, StopRequest
from tests.support.api_service import Agent, Service, StandIn
from tests.support.installation import await_value


def test_a_world_size_alone_is_enough(client: httpx.Client) -> None:
    answer = client.post("/jobs", json={"world_size": 4})
    job = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/jobs/{job['job_id']}"
    assert (job["status"], job["world_size"], job["is_terminal"]) == ("QUEUED", 4, False)
    assert job["created_at"].endswith("Z")
    assert "synthetic" in job["message"]
    assert client.get(answer.headers["location"]).json() == job


def test_a_repeated_request_returns_the_original_response(
    service: Service, client: httpx.Client, stand_in: StandIn, name: str
) -> None:
    def submit(world_size: int = 1) -> httpx.Response:
        body = {"job_id": name, "world_size": world_size, "env": {"A": "b"}}
        return client.post("/jobs", json=body, headers={"Idempotency-Key": name})

    first = submit()
    (service.root / "checkpoints" / name / "worker_0/step_0000000042.g0003").mkdir(parents=True)
    again = submit()
    assert again.json() == first.json()
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert submit(2).json()["type"] == "/problems/idempotency-conflict"
    stand_in.end(name)
    client.delete(f"/jobs/{name}").raise_for_status()
    late = submit()
    assert (late.status_code, late.json()["job_uid"]) == (201, first.json()["job_uid"])
    assert late.json()["spec"] == first.json()["spec"] | {"env": {}}
    assert client.get(f"/jobs/{name}").status_code == 404


def test_stopping_twice_is_stopping_once(client: httpx.Client, stand_in: StandIn, job: str) -> None:
    stand_in.run(job)
    first = client.post(f"/jobs/{job}/stop", json={"grace_seconds": 3, "reason": "it diverges"})
    again = client.post(f"/jobs/{job}/stop", json={"reason": "once more"})
    assert first.json() == again.json()
    assert (first.json()["status"], first.json()["stop_requested"]) == ("STOPPING", True)
    events = client.get(f"/jobs/{job}/events").json()["events"]
    asked = [event["message"] for event in events if event["kind"] == "stop_requested"]
    assert asked == ["a graceful stop was requested: it diverges"]
    stand_in.move(job, JobStatus.STOPPING, JobStatus.STOPPED)
    assert client.post(f"/jobs/{job}/stop").json()["status"] == "STOPPED"


@pytest.mark.parametrize(
    ("query", "request_made", "logs", "checkpoints"),
    [
        ({"stop_first": True}, StopRequest.GRACEFUL, False, True),
        ({"stop_first": True, "delete_logs": False}, StopRequest.GRACEFUL, True, True),
        ({"force": True}, StopRequest.FORCED, False, False),
        ({"force": True, "delete_checkpoints": False}, StopRequest.FORCED, False, True),
    ],
)
def test_deleting_waits_for_the_end(  # noqa: PLR0913, PLR0917  a table and its fixtures
    service: Service,
    client: httpx.Client,
    stand_in: StandIn,
    agent: Agent,
    job: str,
    query: dict[str, bool],
    request_made: StopRequest,
    logs: bool,  # noqa: FBT001  a table's column
    checkpoints: bool,  # noqa: FBT001  a table's column
) -> None:
    agent.write(job, 0, "line\n")
    kept = service.root / "checkpoints" / job
    kept.mkdir(parents=True)
    (kept / "LATEST").write_text("step_0000000001.g0000\n")
    stand_in.run(job)
    uid = client.get(f"/jobs/{job}").json()["job_uid"]
    answers = []
    deleting = threading.Thread(
        target=lambda: answers.append(client.delete(f"/jobs/{job}", params=query))
    )
    deleting.start()
    while stand_in.jobs.get(JobId(job)).stop_request is None:
        assert deleting.is_alive()
    assert stand_in.jobs.get(JobId(job)).stop_request is request_made
    stand_in.move(job, JobStatus.STOPPING, JobStatus.STOPPED)
    deleting.join()
    assert answers[0].json() == {
        "job_id": job,
        "deleted": True,
        "logs_deleted": not logs,
        "checkpoints_deleted": not checkpoints,
        "checkpoints_left": False,
    }
    root = service.files.job(job).root
    assert not root.exists()
    assert root.with_name(f"{job}.{uid}").exists() is logs
    assert kept.exists() is checkpoints
    assert client.get(f"/jobs/{job}").status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/jobs/{job}?stop_first=true"),
        ("POST", "/jobs/purge?stop_running=true&statuses=RUNNING"),
    ],
)
def test_a_token_revoked_while_a_delete_waits_deletes_nothing(
    service: Service,
    client: httpx.Client,
    stand_in: StandIn,
    agent: Agent,
    job: str,
    method: str,
    path: str,
) -> None:
    agent.write(job, 0, "line\n")
    stand_in.run(job)
    made = client.post("/tokens", json={"name": job, "scope": "submit"}).json()
    shown = {"Authorization": f"Bearer {made['token']}"}
    answers = []
    deleting = threading.Thread(
        target=lambda: answers.append(client.request(method, path.format(job=job), headers=shown))
    )
    deleting.start()
    await_value(
        lambda: stand_in.jobs.get(JobId(job)).stop_request,
        lambda: f"no stop was requested; the answers are {answers}",
    )
    client.delete(f"/tokens/{job}").raise_for_status()
    stand_in.move(job, JobStatus.STOPPING, JobStatus.STOPPED)
    deleting.join()
    assert (answers[0].status_code, answers[0].json()["type"]) == (401, "/problems/revoked-token")
    assert client.get(f"/jobs/{job}").json()["status"] == "STOPPED"
    assert service.files.job(job).log(0, 0).read_text() == "line\n"


def test_a_delete_does_not_wait_without_a_coordinator(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.resign()
    refused = client.delete(f"/jobs/{job}?stop_first=true")
    purged = client.post("/jobs/purge?stop_running=true&statuses=QUEUED")
    assert stand_in.jobs.get(JobId(job)).stop_request is None, "a refusal changes nothing"
    health = client.get("/health").json()
    stand_in.take_office()
    assert [refused.status_code, purged.status_code] == [503, 200]
    assert "make up" in refused.json()["detail"]
    assert job in purged.json()["skipped"]
    assert health["status"] == health["checks"]["coordinator"]["status"] == "degraded"


def test_a_link_in_place_of_checkpoints_is_not_followed(
    service: Service, client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    precious = service.root / "precious"
    precious.mkdir()
    (service.root / "checkpoints").mkdir(exist_ok=True)
    (service.root / "checkpoints" / job).symlink_to(precious)
    stand_in.move(job, JobStatus.STOPPED)
    assert client.delete(f"/jobs/{job}?force=true").json()["checkpoints_deleted"] is False
    assert precious.is_dir()


def test_a_purge_skips_running_jobs_and_prefers_days(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    over = client.post("/jobs", json={}).json()["job_id"]
    stand_in.move(over, JobStatus.STOPPED)
    stand_in.run(job)
    statuses = ["STOPPED", "RUNNING"]
    young = client.post(
        "/jobs/purge",
        params={"older_than_days": 1, "older_than_hours": 0, "statuses": statuses},
    )
    nothing = {"matched": 0, "deleted": 0, "freed_bytes": 0}
    assert young.json() == nothing | {"job_ids": [], "skipped": [], "failed": []}
    found = client.post("/jobs/purge", params={"older_than_hours": 0, "statuses": statuses}).json()
    assert over in found["job_ids"]
    assert job in found["skipped"]
    assert found["matched"] == found["deleted"] + len(found["skipped"])
    assert client.get(f"/jobs/{job}").status_code == 200


# Dry runs


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
    request = plan["request"]
    assert (request["engine"], request["command"][-1]) == ("local", "worker.agent")
    assert (request["content"]["token"], request["content"]["agent_number"]) == ("<token>", 1)
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
