"""Requests that change nothing, from tables: most are refused, each as its line says."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from muster.contracts.job.status import JobStatus
from tests.support.api_service import Service, StandIn
from tests.support.database_samples import member, worker
from tests.support.refusals import Table, stored, tables

TABLES = [
    table
    for path in sorted(Path(__file__).with_name("refusals").glob("*.txt"))
    for table in tables(path)
]

MEMBERS = ["syncing", "draining", "failed", "left", "active", "active", "active"]


@pytest.fixture(scope="module")
def names(service: Service, client: httpx.Client, stand_in: StandIn) -> Iterator[dict[str, str]]:
    """Jobs in several states, and a token of scope read."""
    elastic = {"world_size": 4, "min_workers": 3, "max_workers": 6}
    bodies = {"job": {"mode": "independent", "world_size": 2}, "elastic": elastic, "over": elastic}
    bodies |= {"young": elastic, "saving": elastic}
    for name, body in bodies.items():
        client.post("/jobs", json={"job_id": name, **body}).raise_for_status()
    (service.root / "empty").mkdir(exist_ok=True)
    (service.root / "jsonl").mkdir(exist_ok=True)
    (service.root / "jsonl" / "train.jsonl").touch()
    # Unreadable even for root: a directory.
    (service.root / "unreadable" / "shard_00000.txt").mkdir(parents=True, exist_ok=True)
    (service.root / "blank").mkdir(exist_ok=True)
    (service.root / "blank" / "shard_00000.txt").write_text("{}\n\n")
    (service.root / "loop").unlink(missing_ok=True)
    (service.root / "loop").symlink_to("loop")
    members = [member(number, state=state) for number, state in enumerate(MEMBERS)]
    for name in ("elastic", "over", "saving"):
        stand_in.run(name)
        stand_in.write(name, members=members)
    stand_in.write("saving", ranks=[worker(0, state="exited", process=None)])
    stand_in.move("over", JobStatus.COMPLETED)
    client.post("/jobs/saving/checkpoint").raise_for_status()
    token = client.post("/tokens", json={"name": "looker", "scope": "read"}).json()["token"]
    etag = client.get("/jobs/elastic").headers["etag"]
    sizes = {"hundred": 100, "kib": 1024, "long": 5000, "headers": 130 << 10}
    crowds = {
        "query": "&".join(f"status{number}" for number in range(10_000)),
        "env": json.dumps({"env": {f"A{number}": "" for number in range(1000)}}),
        "words": json.dumps({"command": [""] * 2001}),
    }
    words = {name: "x" * size for name, size in sizes.items()}
    yield {"read": token, "etag": etag} | words | crowds
    for name in bodies:
        stand_in.end(name)
        client.delete(f"/jobs/{name}").raise_for_status()
    client.delete("/tokens/looker").raise_for_status()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_request_is_answered_and_changes_nothing(
    service: Service, names: dict[str, str], table: Table
) -> None:
    before = stored(service)
    assert table.replay(service, names) == table.lines
    assert stored(service) == before
