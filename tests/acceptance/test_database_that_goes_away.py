"""The database fails for some seconds: training continues, and events are recorded once."""

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from sqlalchemy import make_url

from stress.outage import endure
from tests.support.installation import Installation, await_value, locked
from tests.support.marks import long
from tests.support.postgres_server import FragilePostgres, fragile_postgres, ways
from tests.support.undisturbed import UndisturbedRuns

SECONDS = 1.5
"""`stress/outage.py` does it for as long as you like."""

PASSWORD = "hunter2secretpw"  # noqa: S105  looked for


@pytest.fixture(scope="module")
def server() -> Iterator[FragilePostgres]:
    with fragile_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def remote(
    tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path, server: FragilePostgres
) -> Iterator[Installation]:
    root = tmp_path_factory.mktemp("remote")
    # The server does not ask for a password.
    url = make_url(server.url).set(password=PASSWORD).render_as_string(hide_password=False)
    environment = {"MUSTER_DATABASE_URL": url, "DATASET_DIR": str(dataset_dir)}
    with Installation(root, **environment) as installation:
        yield installation


@pytest.mark.postgres
@pytest.mark.parametrize("way", ["killed", long("cut"), "read-only"])
def test_no_job_notices_a_server_that_goes_away(
    way: str, server: FragilePostgres, remote: Installation, undisturbed: UndisturbedRuns
) -> None:
    _endures(remote, way, ways(server)[way], undisturbed)


@pytest.mark.postgres
def test_errors_show_no_password_and_strangers_no_detail(
    remote: Installation, server: FragilePostgres
) -> None:
    made_up = {"Authorization": f"Bearer mst_{'0' * 12}_{'0' * 64}"}
    with ways(server)["killed"]():
        told = [remote.request("GET", path) for path in ("/jobs", "/health")]
        stranger = remote.request("GET", "/jobs", headers=made_up)
    assert stranger.status_code == 503
    assert stranger.json()["detail"].startswith("The token cannot be checked")
    assert all("cannot be used now" in answer.text for answer in told)
    logs = remote.api.log.read_text() + remote.coordinator.log.read_text()
    assert "cannot look up a token: the database postgresql" in logs
    assert PASSWORD not in logs + "".join(answer.text for answer in (*told, stranger))


def test_locked_database_and_a_dead_coordinator_disturb_no_job(
    installation: Installation, undisturbed: UndisturbedRuns
) -> None:
    _endures(installation, "locked", lambda: locked(installation), undisturbed, ["coordinator"])


TELLING = """
import os, pathlib, sys, time
from muster.contracts.settings.environ import AGENT_FD
from muster.contracts.messages.wire import encode
from muster.contracts.messages.rank import (Warned)

def await_file(name):
    while not pathlib.Path(sys.argv[1], name).exists():
        time.sleep(0.02)

print("ready", flush=True)
await_file("tell")
for word in ("one", "two", "three"):
    os.write(int(os.environ[AGENT_FD]), encode(Warned(message=word)))
pathlib.Path(sys.argv[1], "told").touch()
await_file("go")
"""
"""Says what an agent repeats only the last of."""


@pytest.mark.postgres
def test_a_coordinator_stopped_during_an_outage_loses_no_event(
    remote: Installation, server: FragilePostgres, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", TELLING, str(tmp_path)]
    job_id = remote.submit(world_size=1, command=command)
    await_value(lambda: "ready" in remote.log(job_id), lambda: "it is not ready")
    coordinator, log = remote.coordinator, remote.coordinator.log
    before = log.stat().st_size

    def tells(action: str) -> None:
        await_value(lambda: action in log.read_text()[before:], lambda: f"no {action}")

    with ways(server)["killed"]():
        (tmp_path / "tell").touch()
        # Another commit may fail before that of its warnings.
        await_value((tmp_path / "told").exists, lambda: "it has not told")
        tells("commit_failed")
        assert coordinator.process is not None
        coordinator.process.send_signal(signal.SIGTERM)
        tells("handover_waits")
    assert coordinator.process.wait(60) == 0
    coordinator.start()
    (tmp_path / "go").touch()
    remote.complete(job_id)
    told = [event["message"] for event in remote.events(job_id) if event["kind"] == "warned"]
    assert [message for message in told if message.endswith(("one", "two"))] == [
        "rank 0: one",
        "rank 0: two",
    ]


def _endures(
    installation: Installation,
    way: str,
    outage: Callable[[], AbstractContextManager[None]],
    undisturbed: UndisturbedRuns,
    dying: Collection[str] = (),
) -> None:
    report = endure(installation, way, outage, SECONDS, undisturbed, dying)
    assert not report.faults, report
