"""The API at the port of each node, over real links and with the real API process."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from muster.client import Client
from muster.contracts.relay import RelayedClient
from muster.links.serving import listen
from muster.mesh import relay
from muster.mesh.relay import ApiRelay, Target
from tests.support.api_service import DEADLINE_SECONDS, Service
from tests.support.networks import Home, await_link

TOKEN = "f" * 64
OWN = RelayedClient(node_id="n-1", host="desk", user="uid:1000")
EVENT_STREAM = {"Accept": "text/event-stream"}


@dataclass
class Household:
    """Two nodes, of which the first leads, and an API that a node has started."""

    service: Service
    targets: list[Target]
    """Of each node; tests change them."""
    ports: list[int]
    hosts: list[str]
    leads: list[Target] = field(default_factory=list)

    def url(self, node: int) -> str:
        return f"http://127.0.0.1:{self.ports[node]}"

    def raw(self, port: int, sent: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS) as client:
            client.sendall(sent)
            return b"".join(iter(lambda: client.recv(65536), b""))


def household_of(root: Path, **environ: str) -> Iterator[Household]:
    with ExitStack() as ending:
        service = Service(root, MUSTER_NODES=str(root / "nodes.json"), **environ)
        service.start()
        ending.callback(lambda: service.process and service.end(signal.SIGKILL))
        networks = Home(root, ending).linked(2)
        for network, other in zip(networks, reversed(networks), strict=True):
            await_link(network, other)
        leader = networks[1].members()[0]
        sockets = [listen("127.0.0.1", 0) for _ in networks]
        made = Household(
            service,
            [service.port, leader],
            [each.getsockname()[1] for each in sockets],
            [network.hello.host for network in networks],
            [service.port, leader],
        )
        for node, (network, listening) in enumerate(zip(networks, sockets, strict=True)):
            ApiRelay(network, listening, lambda node=node: made.targets[node])  # type: ignore[misc]
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Household]:
    yield from household_of(tmp_path_factory.mktemp("relay"), MUSTER_TOKEN=TOKEN)


@pytest.fixture
def household(shared: Household) -> Iterator[Household]:
    yield shared
    shared.targets[:] = shared.leads


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the relays see another user of their machine."""
    monkeypatch.setattr(relay, "is_same_user", lambda _: False)


@pytest.mark.parametrize("node", [0, 1])
def test_the_own_user_of_each_node_is_admin(household: Household, node: int) -> None:
    with Client(household.url(node)) as client:
        client.submit(["true"])
        assert client.jobs()
        assert client.connection.get("/tokens") == []
    name = f"uid:{os.geteuid()}@{household.hosts[node]}"
    assert name in household.service.log.read_text()
