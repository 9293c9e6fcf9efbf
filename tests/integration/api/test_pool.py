"""Scale, pause, remove workers and audit over HTTP."""

import os

import httpx

from database.records import AgentRecord
from muster.contracts.agent import AgentState
from muster.contracts.job.status import JobId
from tests.support.api_service import StandIn
from tests.support.database_samples import NOON, commit, epoch, member, worker


def kinds(client: httpx.Client, job: str) -> list[str]:
    return [event["kind"] for event in client.get(f"/jobs/{job}/events").json()["events"]]


def test_a_new_world_size_shows_everywhere(
    client: httpx.Client, stand_in: StandIn, elastic: str
) -> None:
    for size in (6, 6, 2):
        answer = client.patch(f"/jobs/{elastic}", json={"world_size": size})
        assert (answer.status_code, answer.json()["world_size"]) == (200, size)
    assert stand_in.jobs.get(JobId(elastic)).wanted_world_size == 2
    assert client.get(f"/jobs/{elastic}").json()["world_size"] == 2
    assert client.get(f"/jobs/{elastic}/workers").json()["world_size"] == 2
    summary = client.get(f"/jobs/{elastic}/summary").json()
    assert (summary["world_size"], len(summary["workers"])) == (2, 2)
    assert client.get(f"/jobs/{elastic}").json()["spec"]["world_size"] == 4, "what was asked for"
    assert kinds(client, elastic).count("scale_requested") == 2


def test_pause_and_resume_are_idempotent(
    client: httpx.Client, stand_in: StandIn, elastic: str
) -> None:
    assert client.post(f"/jobs/{elastic}/resume").json()["pause_requested"] is False
    for _ in range(2):
        assert client.post(f"/jobs/{elastic}/pause").json()["pause_requested"] is True
    assert stand_in.jobs.get(JobId(elastic)).pause_request is True
    for _ in range(2):
        assert client.post(f"/jobs/{elastic}/resume").json()["pause_requested"] is False
    assert kinds(client, elastic) == ["submitted", "pause_requested", "resume_requested"]


def test_the_pool_shows_present_and_former_workers(
    client: httpx.Client, stand_in: StandIn, elastic: str
) -> None:
    mine = stand_in.lease.process
    stand_in.write(
        elastic,
        members=[
            member(0, state="failed"),
            member(1, backend="cuda", transport="shared_memory", gpu_count=2),
            member(2, rank=0, attempt=1, state="syncing", joined_step=None, node=None),
        ],
        ranks=[
            worker(0, attempt=1, process=None, state="spawned"),
            worker(1, process=mine, step=41),
        ],
    )
    found = client.get(f"/jobs/{elastic}/workers").json()
    assert (found["job_id"], found["world_size"]) == (elastic, 4)
    assert (found["active"], found["is_changing"]) == (1, True)
    failed, active, syncing = found["workers"]
    assert (failed["worker_id"], failed["state"]) == ("0", "failed")
    assert (failed["pid"], failed["step"]) == (None, None), "its rank is another's by now"
    assert (failed["attempt"], failed["process"]) == (0, None)
    assert active == {
        "worker_id": "1",
        "rank": 1,
        "state": "active",
        "attempt": 0,
        "process": "live",
        "pid": os.getpid(),
        "node": "höst-1",
        "gpu_count": 2,
        "backend": "cuda",
        "transport": "shared_memory",
        "joined_at": NOON.isoformat().replace("+00:00", "Z"),
        "joined_step": 0,
        "last_heartbeat_age_seconds": None,
        "step": 41,
    }
    assert (syncing["state"], syncing["pid"], syncing["joined_step"]) == ("syncing", None, None)
    same = ("worker_id", "rank", "state", "attempt", "process", "pid")
    shown = client.get(f"/jobs/{elastic}/summary").json()["workers"]
    assert [[one[name] for name in same] for one in shown[:2]] == [
        [one[name] for name in same] for one in (syncing, active)
    ]
    assert [[one[name] for name in same] for one in shown[2:]] == [
        [None, rank, None, None, "waiting", None] for rank in (2, 3)
    ]


def test_the_workers_of_an_independent_job_are_its_ranks(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.run(job, worker(1, attempt=3, process=stand_in.lease.process, step=7))
    waiting, live = client.get(f"/jobs/{job}/workers").json()["workers"]
    assert (waiting["rank"], waiting["state"], waiting["pid"]) == (0, "waiting", None)
    assert (live["worker_id"], live["state"], live["step"]) == ("1", "live", 7)
    assert (live["attempt"], live["process"]) == (3, "live")
    assert (live["pid"], live["joined_at"], live["gpu_count"]) == (os.getpid(), None, 0)


def test_a_leaving_worker_is_shown_as_draining(
    client: httpx.Client, stand_in: StandIn, elastic: str
) -> None:
    members, ranks = map(member, range(4)), map(worker, range(4))
    stand_in.write(elastic, members=[*members], ranks=[*ranks])
    answer = client.post(f"/jobs/{elastic}/workers/2/leave")
    assert (answer.status_code, answer.json()["world_size"]) == (200, 3)
    workers = client.get(f"/jobs/{elastic}/workers").json()["workers"]
    states = [one["state"] for one in workers]
    assert states == ["active", "active", "draining", "active"]
    summary = client.get(f"/jobs/{elastic}/summary").json()
    assert summary["workers"][2]["state"] == "draining"
    assert kinds(client, elastic)[-1] == "departure_requested"
    again = client.post(f"/jobs/{elastic}/workers/2/leave")
    assert (again.status_code, "asked to already" in again.json()["detail"]) == (409, True)
    stand_in.write(elastic, members=[member(2, state="left")])
    workers = client.get(f"/jobs/{elastic}/workers").json()["workers"]
    assert workers[2]["state"] == "left"


def test_an_audit_shows_read_samples_and_checkpoints(
    client: httpx.Client, stand_in: StandIn, elastic: str
) -> None:
    reading = epoch(1, samples=7, hash_sum=0xAB)
    stand_in.write(elastic, commits=[commit(5), commit(10, epoch=1)], epochs=[epoch(0), reading])
    found = client.get(f"/jobs/{elastic}/audit").json()
    assert found == {
        "job_id": elastic,
        "bits": "same",
        "complete": False,
        "exactly_once": None,
        "epochs": [
            {
                "epoch": 0,
                "samples": 100,
                "expected_samples": 100,
                "hash": "8000000000000000",
                "expected_hash": "8000000000000000",
                "exactly_once": True,
            },
            {
                "epoch": 1,
                "samples": 7,
                "expected_samples": 100,
                "hash": "00000000000000ab",
                "expected_hash": "8000000000000000",
                "exactly_once": None,
            },
        ],
        "epochs_omitted": 0,
        "checkpoints_omitted": 0,
        "checkpoints": [
            {
                "step": step,
                "epoch": number,
                "generation": 1,
                "digest": "d" * 64,
                "saved_at": NOON.isoformat().replace("+00:00", "Z"),
            }
            for number, step in enumerate([5, 10])
        ],
    }
    last = client.get(f"/jobs/{elastic}/audit?limit=1").json()
    assert (last["epochs"], last["checkpoints"]) == (found["epochs"][1:], found["checkpoints"][1:])


def test_hosts_show_what_runs_there(
    client: httpx.Client, stand_in: StandIn, elastic: str, node: str
) -> None:
    stand_in.write(
        elastic,
        agents=[AgentRecord(host=node, agent_number=1, state=AgentState.CONNECTED)],
        ranks=[
            worker(0, host=node, process=stand_in.lease.process),
            worker(1, host=node, state="exited"),
        ],
    )
    (found,) = client.get("/hosts").json()["hosts"]
    assert (found["host"], found["address"], found["transport"]) == ("local", "127.0.0.1", "local")
    assert (found["slots_in_use"], found["jobs"]) == (1, [elastic])
    assert found["agents"] == {"connected": 1}
    workers = client.get(f"/jobs/{elastic}/workers").json()
    assert workers["agents"] == [{"host": "local", "state": "connected"}]
    (rank, _, *_) = client.get(f"/jobs/{elastic}/summary").json()["workers"]
    assert rank["node"] == stand_in.lease.process.node
    fault = client.post(f"/jobs/{elastic}/faults", json={"host": "local"}).json()
    assert (fault["host"], fault["agent"]) == ("local", 1)
    assert [it.host for it in stand_in.jobs.get(JobId(elastic)).faults] == [node]


def test_a_fault_names_the_processes_that_it_strikes(
    client: httpx.Client, stand_in: StandIn, elastic: str
) -> None:
    mine = stand_in.lease.process
    ranks = [worker(it, attempt=it, process=mine, host=f"host-{it // 2}") for it in range(4)]
    ranks[2] = worker(2, attempt=-1, process=None, state="exited", host="host-1")
    agents = [AgentRecord(host=f"host-{it}", agent_number=3 + it) for it in range(2)]
    stand_in.write(elastic, ranks=ranks, agents=agents)
    one = {"rank": 1, "attempt": 1, "pid": os.getpid()}
    struck = client.post(f"/jobs/{elastic}/faults", json={"rank": 1, "fault": "stop"})
    assert (struck.status_code, struck.json()) == (
        202,
        {"number": 1, "fault": "stop", "host": "host-0", "agent": None, "processes": [one]},
    )
    host = client.post(f"/jobs/{elastic}/faults", json={"host": "host-1"}).json()
    assert (host["agent"], [it["rank"] for it in host["processes"]]) == (4, [3])
    assert [it.number for it in stand_in.jobs.get(JobId(elastic)).faults] == [1, 2]
    assert kinds(client, elastic)[-2:] == ["fault_requested"] * 2
