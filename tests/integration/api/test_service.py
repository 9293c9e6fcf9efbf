"""The service as a whole: its health, its document, its start and its end."""

import re
import signal
import socket
from functools import partial
from pathlib import Path

import httpx
import pytest

from api.dependencies import RESERVE_BYTES
from database import HEAD
from database.engine import Database
from muster.cluster.identity import node_id
from muster.cluster.members import MemberNode, Members, NodeLink, write_members
from tests.support.api_service import DEADLINE_SECONDS, Agent, Service, StandIn
from tests.support.scarcity import filled, small_disk


def test_the_page_shows_the_nodes_of_a_household(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.json"
    running = Service(tmp_path, MUSTER_NODES=str(nodes))
    running.files.root.mkdir(mode=0o700)
    own = node_id(running.files.node_key)
    common = {"slots": 2, "cores": 4, "ram_mb": 1000}
    away = {"address": ("10.0.0.2", 7000), "is_linked": False}
    desk, lap = (
        MemberNode(node_id=own, name="desk", address=None, **common),
        MemberNode(node_id="lap-id", name="lap", **common, **away),
    )
    pairs = [(own, "lap-id"), ("gone", own)]
    links = tuple(NodeLink(nodes=pair, bytes_per_second=9.96e7) for pair in pairs)
    write_members(nodes, Members(nodes=(desk, lap), ring=(own, "lap-id"), links=links))
    running.start()
    try:
        found = httpx.get(f"{running.url}/hosts").json()
        shown = httpx.get(f"{running.url}/ui/service").text
    finally:
        running.end(signal.SIGKILL)
    assert (found["leader"], found["ring"]) == ("desk", ["desk", "lap"])
    assert found["links"] == [{"hosts": ["desk", "lap"], "megabytes_per_second": 99.6}]
    assert [host["is_linked"] for host in found["hosts"]] == [True, False]
    for words in ("desk → lap → desk", "99.6 MB/s", "not linked: is it on?"):
        assert words in shown


@pytest.mark.usefixtures("stand_in")
def test_health_reports_the_coordinator(client: httpx.Client) -> None:
    assert client.head("/health").status_code == 200
    health = client.get("/health").json()
    assert (health["status"], health["checks"]["coordinator"]["status"]) == ("ok", "ok")
    assert health["uptime_seconds"] >= 0


def test_probes_answer_without_a_coordinator(client: httpx.Client, stand_in: StandIn) -> None:
    stand_in.resign()
    answers = [client.get(path) for path in ("/livez", "/healthz", "/readyz")]
    stand_in.take_office()
    assert [answer.json() for answer in answers] == [{"status": "ok"}] * 3


def test_version_names_program_api_and_schema(client: httpx.Client, service: Service) -> None:
    health = client.get("/health").json()
    assert health["checks"]["disk"]["detail"].endswith("free")
    assert client.get("/version").json() == {
        "app": health["version"],
        "api": "v1",
        "schema_revision": HEAD,
        "database": "sqlite",
        "checkpoint_dir": str(service.root / "checkpoints"),
        "data_dir": str(service.files.root),
    }


def test_every_path_exists_under_the_api_version(client: httpx.Client, stand_in: StandIn) -> None:
    created = client.post("/api/v1/jobs", json={"world_size": 1})
    where = created.headers["location"]
    assert where == f"/api/v1/jobs/{created.json()['job_id']}"
    assert client.get(where).json() == client.get(where.removeprefix("/api/v1")).json()
    stand_in.end(created.json()["job_id"])


def test_head_is_get_without_a_body(
    client: httpx.Client, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "line\n")
    stand_in.run(job)
    paths = ["/livez", "/readyz", "/jobs", f"/jobs/{job}", f"/jobs/{job}/logs", "/openapi.json"]
    for path in [*paths, f"/jobs/{job}?wait=0.1", "/jobs/unknown", "/nothing"]:
        asked, told = client.head(path), client.get(path)
        assert (asked.status_code, asked.content) == (told.status_code, b""), path
        assert asked.headers["content-length"] == told.headers["content-length"], path


def test_the_root_leads_to_the_page(client: httpx.Client, service: Service) -> None:
    answer = client.get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui/")
    assert service.raw(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").startswith(b"HTTP/1.1 403")


def test_the_documentation_has_every_operation_and_no_script(client: httpx.Client) -> None:
    page = client.get("/docs")
    policy = page.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "style-src 'unsafe-inline'"} <= set(policy)
    assert not re.search("<script|<link|<img|style=| on[a-z]+=", page.text)
    shown = re.findall(r"<b class=\"\w+\">(\w+)</b><code>([^<]+)</code>", page.text)
    document = client.get("/openapi.json").json()
    paths = document["paths"]
    assert sorted(shown) == sorted((one.upper(), path) for path in paths for one in paths[path])
    ids, targets = (set(re.findall(f'{name}="#?(\\w+)"', page.text)) for name in ("id", "href"))
    assert targets <= ids == set(document["components"]["schemas"])


def test_every_request_has_an_id(client: httpx.Client) -> None:
    given = client.get("/nothing", headers={"X-Request-ID": "mine"})
    assert given.headers["x-request-id"] == given.json()["request_id"] == "mine"
    assert len(client.get("/health").headers["x-request-id"]) == 32


def test_open_streams_do_not_delay_the_shutdown(
    service: Service, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "line\n")
    stand_in.run(job)
    opened = [socket.create_connection(("127.0.0.1", service.port), 20) for _ in range(20)]
    for stream in opened:
        stream.sendall(f"GET /jobs/{job}/logs/stream HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        received = b""
        while b"data: " not in received:
            received += stream.recv(4096)
    assert service.end(signal.SIGTERM) == 0
    # A stream that is cancelled would lack the last chunk.
    ends = [b"".join(iter(partial(stream.recv, 4096), b""))[-5:] for stream in opened]
    assert ends == [b"0\r\n\r\n"] * 20
    for stream in opened:
        stream.close()
    service.start()


def test_a_full_disk_can_be_cleared(tmp_path: Path) -> None:
    running = Service(tmp_path)
    with small_disk(running.files.root, "24m"):
        running.start()
        database = Database.open(running.database_url)
        try:
            with httpx.Client(base_url=running.url, timeout=DEADLINE_SECONDS) as client:
                _clear_full_disk(running, client, StandIn(database))
        finally:
            database.close()
            running.end(signal.SIGKILL)


def _clear_full_disk(service: Service, client: httpx.Client, stand_in: StandIn) -> None:
    fields = {"mode": "independent", "world_size": 1}
    for method, path in (
        ("POST", "/jobs/old/stop"),
        ("DELETE", "/jobs/over?delete_logs=false"),
        ("POST", "/jobs/purge?delete_logs=false"),
    ):
        for name in ("old", "over"):  # also makes the reserve again, now that there is room
            client.post("/jobs", json={"job_id": name, **fields})
        stand_in.end("over")
        assert service.files.disk_reserve.stat().st_size == RESERVE_BYTES
        with filled(service.files.root):
            assert client.post("/jobs", json=fields).status_code == 503
            answer = client.request(method, path)
            assert answer.status_code == 200, answer.text
