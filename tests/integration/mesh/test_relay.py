"""The API at the port of each node, over real links and with the real API process."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from muster.client import Client
from muster.cluster.members import MemberNode, Members, write_members
from muster.contracts.relay import RelayedClient, relay_line
from muster.links.serving import listen
from muster.mesh import relay
from muster.mesh.relay import ApiRelay, Target
from tests.support.api_service import DEADLINE_SECONDS, Service
from tests.support.networks import Home, await_link

NAMES = ("attic", "desk")
TOKEN = "f" * 64
BEARER = {"Authorization": f"Bearer {TOKEN}"}
COOKIE = {"Cookie": f"muster_token={TOKEN}"}
JOB = {"mode": "independent", "world_size": 1}
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n\r\n"
ADMIN = GET % (b"/tokens", b"close")
OWN = relay_line(RelayedClient(node_id="n-1", host="desk", user="uid:1000"))


@dataclass
class Household:
    """Two nodes, of which the first leads, and an API that a node has started."""

    service: Service
    ports: list[int]
    targets: list[Target]
    """Of each node; tests change them."""

    def client(self, node: int = 1) -> httpx.Client:
        url = f"http://127.0.0.1:{self.ports[node]}"
        return httpx.Client(base_url=url, timeout=DEADLINE_SECONDS)

    def raw(self, sent: bytes, port: int | None = None) -> bytes:
        address = "127.0.0.1", port or self.ports[1]
        with socket.create_connection(address, timeout=DEADLINE_SECONDS) as client:
            client.sendall(sent)
            return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Household]:
    root = tmp_path_factory.mktemp("relay")
    own = MemberNode(node_id="n-1", name="desk", slots=1, cores=1, ram_mb=1, address=None)
    write_members(root / "nodes.json", Members(cluster_id="c", nodes=(own,)))
    service = Service(root, MUSTER_NODES=str(root / "nodes.json"), MUSTER_TOKEN=TOKEN)
    with ExitStack() as ending:
        ending.callback(lambda: service.process and service.end(signal.SIGKILL))
        service.start()
        networks = Home(root, ending).linked(2)
        for network, name in zip(networks, NAMES, strict=True):
            network.do(lambda network=network, name=name: network.say(host=name))
        await_link(networks[1], networks[0])
        sockets = [listen("127.0.0.1", 0) for _ in networks]
        made = Household(service, [each.getsockname()[1] for each in sockets], [])
        for node, (network, listening) in enumerate(zip(networks, sockets, strict=True)):
            ApiRelay(network, listening, lambda node=node: made.targets[node])
        made.targets[:] = [service.port, networks[1].members()[0]]
        yield made


@pytest.fixture
def household(shared: Household) -> Iterator[Household]:
    led = [*shared.targets]
    yield shared
    shared.targets[:] = led


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the relays see another user of their machine."""
    monkeypatch.setattr(relay, "is_same_user", lambda _: False)


@pytest.mark.parametrize("node", [0, 1])
def test_the_own_user_of_each_node_is_admin(household: Household, node: int) -> None:
    with household.client(node) as client:
        assert client.post("/jobs", json=JOB).is_success
        assert client.get("/tokens", headers={"Cookie": "muster_token=old"}).is_success
    assert f"uid:{os.geteuid()}@{NAMES[node]}" in household.service.log.read_text()


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/tokens", {}, 401),
        ("/tokens", BEARER, 200),
        ("/tokens", COOKIE, 200),
        ("/tokens", {"Forwarded": "for=127.0.0.1", "X-Forwarded-For": "127.0.0.1"}, 401),
        ("/livez", {}, 200),
        ("/ui/login", {}, 200),
        ("/tokens", BEARER | {"Host": "rebound.example"}, 403),
        ("/tokens", COOKIE | {"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_a_stranger_has_only_its_token(
    household: Household, node: int, path: str, headers: dict[str, str], status: int
) -> None:
    with household.client(node) as client:
        assert client.get(path, headers=headers).status_code == status


@pytest.mark.usefixtures("stranger")
def test_the_refusal_of_a_stranger_names_its_node(household: Household) -> None:
    household.raw(ADMIN)
    assert '"other@desk"' in household.service.log.read_text()


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "null"])
def test_a_page_of_another_origin_is_refused(household: Household, origin: str) -> None:
    with household.client() as client:
        answer = client.post("/jobs", json=JOB, headers={"Origin": origin})
        assert answer.json()["type"] == "/problems/foreign-origin"


def test_a_page_of_the_relay_may_change_jobs(household: Household) -> None:
    with household.client() as client:
        origin = str(client.base_url).rstrip("/")
        assert client.post("/jobs", json=JOB, headers={"Origin": origin}).is_success


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(
    "sent",
    [
        OWN + ADMIN,
        GET % (b"/livez", b"keep-alive") + OWN + ADMIN,
        ADMIN.replace(b"Host", OWN + b"Host"),
        b"GET /tokens HTTP/1.1\r\n" + OWN + b"Host: localhost\r\n\r\n",
        OWN * 1000,
        b"M" * 3000 + b"\r\n\r\n",
    ],
    ids=["first", "keep-alive", "in the head", "second line", "many", "no end"],
)
def test_a_client_cannot_imitate_the_line(household: Household, sent: bytes, node: int) -> None:
    try:
        answer = household.raw(sent, household.ports[node])
    except ConnectionResetError:
        return
    assert answer.rpartition(b"HTTP/1.1 ")[2].startswith((b"400", b"401", b"431"))


@pytest.mark.parametrize(
    "sent", [OWN[:30], OWN * 2, OWN.replace(b"uid:1000", b"root"), b"MUSTER-RELAY " + b"x" * 2000]
)
def test_the_api_refuses_a_faulty_line(household: Household, sent: bytes) -> None:
    answer = household.raw(sent + b"\r\n" + ADMIN, household.service.port)
    assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("accept", "kind"), [("*/*", "application/problem+json"), ("text/html,*/*", "text/html")]
)
def test_without_a_leader_the_answer_says_why(household: Household, accept: str, kind: str) -> None:
    household.targets[1] = "attic <1> is away"
    with household.client() as client:
        body = b"x" * 500_000
        answer = client.post("/jobs", content=body, headers={"Accept": accept})
    assert (answer.status_code, answer.headers["Content-Type"]) == (503, kind)
    assert answer.headers["Retry-After"] == "1"
    said = answer.text if kind == "text/html" else answer.json()["detail"]
    assert said.endswith("attic &lt;1&gt; is away" if kind == "text/html" else "attic <1> is away")


def test_a_stream_without_a_leader_is_cut(household: Household) -> None:
    household.targets[1] = "attic is away"
    sent = ADMIN.replace(b"Host", b"Accept: text/event-stream\r\nHost")
    assert household.raw(sent) == b""


@pytest.mark.parametrize("away", ["attic is away", 1])
def test_a_command_waits_for_a_leader(household: Household, away: Target) -> None:
    led, household.targets[:] = [*household.targets], [away, household.targets[1]]
    waits = []
    with Client(f"http://127.0.0.1:{household.ports[1]}") as client:

        def wait(seconds: float) -> None:
            waits.append(seconds)
            household.targets[:] = led

        client.connection.sleep = wait
        client.connection.ask("POST", "/jobs", body=JOB, key=os.urandom(8).hex())
    assert len(waits) == 1


def test_one_user_cannot_take_all_connections(
    household: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CONNECTIONS_EACH", 1)
    with household.client() as first, household.client() as second:
        assert first.get("/livez").is_success
        assert second.get("/livez").status_code == 503
        first.close()
        monkeypatch.undo()
        assert second.get("/livez").is_success
