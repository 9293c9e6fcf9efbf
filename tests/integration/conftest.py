"""One service for all tests, and a job per test."""

import re
import signal
import uuid
from collections.abc import Iterator

import httpx
import pytest

from database.engine import Database
from muster.cluster.identity import node_id
from tests.support.api_service import DEADLINE_SECONDS, Agent, Service, StandIn


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("service"))
    running.start()
    yield running
    if running.process is not None:
        running.end(signal.SIGKILL)


@pytest.fixture(scope="session")
def stand_in(service: Service) -> Iterator[StandIn]:
    database = Database.open(service.database_url)
    yield StandIn(database)
    database.close()


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=DEADLINE_SECONDS) as opened:
        yield opened


@pytest.fixture
def node(service: Service) -> str:
    """What rows call the host of the service."""
    return node_id(service.files.node_key)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """An id for a job that is called after its test."""
    return re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:50] + f"-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def job(client: httpx.Client, stand_in: StandIn, name: str) -> Iterator[str]:
    """A queued job of two independent ranks."""
    fields = {"mode": "independent", "world_size": 2}
    client.post("/jobs", json={"job_id": name, **fields}).raise_for_status()
    yield name
    stand_in.end(name)


@pytest.fixture
def elastic(client: httpx.Client, stand_in: StandIn, name: str) -> Iterator[str]:
    """A running synchronous job of four ranks, that takes two to six."""
    fields = {"mode": "synchronous", "world_size": 4, "min_workers": 2, "max_workers": 6}
    client.post("/jobs", json={"job_id": name, **fields}).raise_for_status()
    stand_in.run(name)
    yield name
    stand_in.end(name)


@pytest.fixture(scope="session")
def agent(service: Service) -> Agent:
    return Agent(service.files)
