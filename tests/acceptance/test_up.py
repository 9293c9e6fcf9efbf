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

from cli.service_record import is_serving
from database.engine import Database
from database.jobs import Jobs
from database.records import Job
from muster.contracts.job import JobId, JobStatus
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

LONG = {"world_size": 2, "epochs": 3, "sleep_sec": 0.05}

DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('deaf', flush=True); time.sleep(600)"
)
"""A rank that does not mind how politely it is asked."""


class Household(Installation):
    """An installation whose services are kept by `muster up`."""

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
def _household(tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path) -> Iterator[Household]:
    with Household(tmp_path_factory.mktemp("up"), DATASET_DIR=str(dataset_dir)) as household:
        yield household


@pytest.fixture
def household(_household: Household) -> Iterator[Household]:
    yield from lent(_household)


@pytest.mark.parametrize("module", ["api", "coordinator"])
def test_a_killed_service_is_back(household: Household, module: str) -> None:
    before = household.service(module)
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    await_end([before])
    await_value(lambda: household.service(module), household.said)
    await_value(lambda: is_serving(household.url), household.said)
    assert f"the {module} was ended by signal 9 (SIGKILL); it is started again" in household.said()


def test_ctrl_c_sends_jobs_back_to_the_queue_and_leaves_nothing(
    household: Household, undisturbed: Undisturbed
) -> None:
    job_id = household.submit(**LONG)
    household.wait_until(job_id, has_saved)
    services = household.services()
    assert len(services) == 2
    assert household.up.end(signal.SIGINT) == 0
    assert not any(map(is_alive, services))
    assert not household.running_processes()
    job = household.stored(job_id)
    assert (job.status, job.reason) == (JobStatus.QUEUED, "interrupted")
    household.start()
    household.complete(job_id)
    assert household.digests(job_id, 2) == undisturbed(**LONG)


@pytest.mark.parametrize("began", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_second_ctrl_c_kills_the_services_at_once(
    household: Household, began: signal.Signals
) -> None:
    job_id = household.submit(
        world_size=1, command=[sys.executable, "-c", DEAF], stop_grace_seconds=600
    )
    ranks = records(household.wait_until(job_id, is_running))
    await_value(lambda: "deaf" in household.log(job_id), lambda: household.describe(job_id))
    services = household.services()
    already = len(household.said())
    assert household.up.process is not None
    household.up.process.send_signal(began)
    again = "(Ctrl-C again kills the services at once)"
    await_value(lambda: again in household.said()[already:], household.said)
    household.up.process.send_signal(signal.SIGINT)
    await_value(lambda: "muster: killed the services" in household.said()[already:], household.said)
    assert household.up.process.wait(DEADLINE_SECONDS) == 0
    household.up.end(signal.SIGTERM)
    assert not any(map(is_alive, services))
    assert all(map(is_alive, ranks))
    assert not household.stored(job_id).is_terminal
    household.start()
    for rank in ranks:
        send_signal(rank, signal.SIGKILL)  # it has its grace period once more, and ignores it
    household.wait_until(job_id, lambda seen: is_running(seen) and not seen["restarts"])
    assert not any(map(is_alive, ranks))


def test_up_killed_outright_leaves_neither_service(household: Household) -> None:
    services = household.services()
    assert len(services) == 2
    household.up.end(signal.SIGKILL)
    await_end(services)


def test_a_port_that_is_not_the_usual_one_is_said_as_a_line_to_copy(household: Household) -> None:
    line = re.compile(r"^export MUSTER_URL=http://\S+:(\d+)$", re.MULTILINE)
    ready = re.findall(r"ready at http://\S+:(\d+),", household.said())
    await_value(
        lambda: line.findall(household.said()) == ready,
        lambda: f"it is not said:\n{end_of(household.up.log)}",
    )


def test_a_second_up_is_told_where_the_first_one_is(household: Household) -> None:
    services = household.services()
    code, errors = refused(household.root, household.environment)
    assert code == 1
    where = str(household.request("GET", "/health").url).removesuffix("/health")
    assert errors == (
        f"muster: Muster is up already for {household.files.root}, at {where}: use that one, or "
        "set MUSTER_DATA_DIR for another\n"
    )
    assert household.services() == services


def test_a_port_that_was_asked_for_and_is_taken_is_named(
    household: Household, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {**household.environment, "MUSTER_DATA_DIR": str(tmp_path / "data")}
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
def test_it_comes_up_at_an_address_of_ipv6(tmp_path: Path) -> None:
    household = Household(tmp_path, MUSTER_HOST="::1")
    household.start()
    answer = household.request("GET", "/jobs")
    assert (answer.status_code, answer.url.host) == (200, "::1")
    household.close()
