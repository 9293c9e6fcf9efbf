"""`muster up`: what it restarts, how it ends, and what remains when it is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.services.record import is_serving
from database.engine import Database
from database.jobs import Jobs
from database.records import Job
from muster.contracts.job.status import JobId, JobStatus
from muster.contracts.rank import ProcessRecord
from muster.host.processes import is_running as is_alive
from muster.host.processes import send_signal
from tests.support.installation import (
    DEADLINE_SECONDS,
    Installation,
    Service,
    Undisturbed,
    await_end,
    await_value,
    end_of,
    has_saved,
    is_running,
    lent,
    records,
)
from tests.support.services import child_service

LONG = {"world_size": 2, "epochs": 3, "sleep_sec": 0.12}

DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('ignored', flush=True)); "
    "print('deaf', flush=True); time.sleep(600)"
)
"""A rank that ignores the request to end."""


class SupervisedInstallation(Installation):
    """An installation whose services run below `muster up`."""

    def __init__(self, root: Path, **environment: str) -> None:
        super().__init__(root, **environment)
        self.up = Service("cli", root, self.environment, words=("up",))

    def start(self) -> None:
        """Start it unless it runs, and wait until it is ready."""
        if self.up.process is not None:
            return
        already = len(self.said())
        self.up.start()
        ready = await_value(
            lambda: re.search(r"ready at (http://\S+:\d+),", self.said()[already:]),
            lambda: f"it does not come up:\n{end_of(self.up.log)}",
        )
        self._client.base_url = ready[1]

    def close(self) -> None:
        self.start()
        try:
            super().close()
        finally:
            self.up.end(signal.SIGINT)

    def said(self) -> str:
        return self.up.log.read_text() if self.up.log.exists() else ""

    def service(self, module: str) -> ProcessRecord | None:
        """Return the process that serves now, if there is one."""
        return child_service(self.up.pid, module)

    def services(self) -> list[ProcessRecord]:
        found = [self.service(module) for module in ("api", "coordinator")]
        return [record for record in found if record is not None]

    def stored(self, job_id: str) -> Job:
        """Return the job as the database has it, for there is no API to ask."""
        database = Database.open(f"sqlite:///{self.files.root}/muster.db")
        try:
            return Jobs(database).get(JobId(job_id))
        finally:
            database.close()


@pytest.fixture(scope="module")
def _supervised(
    tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path
) -> Iterator[SupervisedInstallation]:
    with SupervisedInstallation(
        tmp_path_factory.mktemp("up"), DATASET_DIR=str(dataset_dir)
    ) as supervised:
        yield supervised


@pytest.fixture
def supervised(_supervised: SupervisedInstallation) -> Iterator[SupervisedInstallation]:
    yield from lent(_supervised)


@pytest.mark.parametrize("module", ["api", "coordinator"])
def test_killed_service_is_restarted(supervised: SupervisedInstallation, module: str) -> None:
    before = supervised.service(module)
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    await_end([before])
    await_value(lambda: supervised.service(module), supervised.said)
    await_value(lambda: is_serving(supervised.url), supervised.said)
    assert f"the {module} was ended by signal 9 (SIGKILL); it is started again" in supervised.said()


def test_ctrl_c_sends_jobs_back_to_the_queue_and_leaves_nothing(
    supervised: SupervisedInstallation, undisturbed: Undisturbed
) -> None:
    job_id = supervised.submit(**LONG)
    supervised.wait_until(job_id, has_saved)
    services = supervised.services()
    assert len(services) == 2
    assert supervised.up.end(signal.SIGINT) == 0
    assert not any(map(is_alive, services))
    assert not supervised.running_processes()
    job = supervised.stored(job_id)
    assert (job.status, job.reason) == (JobStatus.QUEUED, "interrupted")
    supervised.start()
    supervised.complete(job_id)
    assert supervised.digests(job_id, 2) == undisturbed(**LONG)


@pytest.mark.parametrize("began", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_second_ctrl_c_kills_the_services_at_once(
    supervised: SupervisedInstallation, began: signal.Signals
) -> None:
    job_id = supervised.submit(
        world_size=1, command=[sys.executable, "-c", DEAF], stop_grace_seconds=600
    )
    ranks = records(supervised.wait_until(job_id, is_running))
    await_value(lambda: "deaf" in supervised.log(job_id), lambda: supervised.describe(job_id))
    services = supervised.services()
    already = len(supervised.said())
    assert supervised.up.process is not None
    supervised.up.process.send_signal(began)
    await_value(lambda: "ignored" in supervised.log(job_id), lambda: supervised.describe(job_id))
    assert "(Ctrl-C again kills the services at once)" in supervised.said()[already:]
    supervised.up.process.send_signal(signal.SIGINT)
    await_value(
        lambda: "muster: killed the services" in supervised.said()[already:], supervised.said
    )
    assert supervised.up.process.wait(DEADLINE_SECONDS) == 0
    supervised.up.end(signal.SIGTERM)
    assert not any(map(is_alive, services))
    assert all(map(is_alive, ranks))
    assert not supervised.stored(job_id).is_terminal
    supervised.start()
    for rank in ranks:
        send_signal(rank, signal.SIGKILL)  # it has its grace period once more, and ignores it
    supervised.wait_until(job_id, lambda seen: is_running(seen) and not seen["restarts"])
    assert not any(map(is_alive, ranks))


def test_up_killed_outright_leaves_neither_service(supervised: SupervisedInstallation) -> None:
    services = supervised.services()
    assert len(services) == 2
    supervised.up.end(signal.SIGKILL)
    await_end(services)


def test_second_up_names_the_first(supervised: SupervisedInstallation) -> None:
    services = supervised.services()
    code, errors = refused(supervised.root, supervised.environment)
    assert code == 1
    where = str(supervised.request("GET", "/health").url).removesuffix("/health")
    assert errors == (
        f"muster: Muster is up already for {supervised.files.root}, at {where}: use that one, or "
        "set MUSTER_DATA_DIR for another\n"
    )
    assert supervised.services() == services


def test_chosen_port_that_is_taken_is_named(
    supervised: SupervisedInstallation, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {**supervised.environment, "MUSTER_DATA_DIR": str(tmp_path / "data")}
        code, errors = refused(tmp_path, {**environment, "MUSTER_PORT": str(port)})
    assert code == 1
    assert errors.startswith(f"muster: port {port} of 127.0.0.1 is taken: ")
    assert errors.count("\n") == 1


def refused(directory: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Return exit code and errors of an `up` that should not go on."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "cli", "up"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6_address_is_served(tmp_path: Path) -> None:
    supervised = SupervisedInstallation(tmp_path, MUSTER_HOST="::1")
    supervised.start()
    answer = supervised.request("GET", "/jobs")
    assert (answer.status_code, answer.url.host) == (200, "::1")
    supervised.close()
