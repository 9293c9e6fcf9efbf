"""One job without a service: what is stored of it, what is shown of it, and how it resumes."""

import asyncio
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from coordinator import foreground
from coordinator.foreground import Display, EventPrinter
from database.engine import Database
from database.errors import DatabaseUnavailable
from database.history import History
from database.jobs import Jobs, append_events
from database.records import Event, Job
from muster.contracts.errors import JobDiffers
from muster.contracts.job import JobId, JobStatus
from muster.contracts.paths import JobFiles
from muster.contracts.retry import INTERRUPTED_CODE
from muster.contracts.settings import ServiceSettings
from muster.contracts.spec import JobSpec
from tests.support.database_samples import bring_to

PATH = (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.COMPLETED)


class Service:
    """Stands in for a coordinator: completes the job as soon as `may_complete` is set."""

    may_complete = asyncio.Event()

    def __init__(self, database: Database, *_: object) -> None:
        self._database = database
        self._asked_to_end = asyncio.Event()

    async def run(self) -> None:
        await self.may_complete.wait()
        bring_to(self._database, Jobs(self._database).get(JobId("one")), *PATH)
        await self._asked_to_end.wait()

    def shut_down(self) -> None:
        self._asked_to_end.set()


class Interrupted(Service):
    """Ends before the job does."""

    async def run(self) -> None:
        bring_to(self._database, Jobs(self._database).get(JobId("one")), JobStatus.STARTING)


class Interruptible(Service):
    """Works until it is asked to end."""

    async def run(self) -> None:
        await self._asked_to_end.wait()


@pytest.fixture
def may_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    event = asyncio.Event()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Service, "may_complete", event)
    monkeypatch.setattr(foreground, "Service", Service)
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # it is that of all tests
    return event


class Listener(EventPrinter):
    """Collects the events' messages."""

    heard: ClassVar[list[str]] = []

    def show_event(self, event: Event) -> None:
        self.heard.append(event.message)


def begin(
    tmp_path: Path, display: Callable[[JobFiles], Display] = Listener, **fields: object
) -> int:
    """Run a job of this spec, or resume it."""
    spec = JobSpec(**{"command": ("true",), "world_size": 1, **fields})
    environ = {"MUSTER_DATA_DIR": str(tmp_path / "state")}
    settings = ServiceSettings.read(environ, cores=2)
    return foreground.play(JobId("one"), spec, settings, environ, display)


def run(tmp_path: Path) -> int:
    environ = {"JOB_ID": "one", "MUSTER_DATA_DIR": str(tmp_path / "state")}
    return foreground.run(ServiceSettings.read(environ, cores=2), environ)


def test_the_stored_job_is_complete(tmp_path: Path, may_complete: asyncio.Event) -> None:
    may_complete.set()
    assert run(tmp_path) == 0
    own = tmp_path / "state" / "foreground" / "one"
    database = Database.open(f"sqlite:///{own}/muster.db")
    try:
        job = Jobs(database).get(JobId("one"))
    finally:
        database.close()
    assert job.spec.dataset_dir == str(own / "datasets" / "synthetic")
    assert job.spec.checkpoint_dir == str(tmp_path / "checkpoints")
    assert job.spec.working_dir == str(tmp_path)


def test_the_job_outlives_an_outage_of_its_database(
    tmp_path: Path, may_complete: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = Jobs.get
    refusals = 0

    def away(jobs: Jobs, job_id: JobId) -> Job:
        nonlocal refusals
        # The first look is that of `run`; only the following ones fail.
        if 0 < refusals < 4:
            refusals += 1
            if refusals == 4:
                loop.call_soon_threadsafe(may_complete.set)
            raise DatabaseUnavailable("away")
        refusals = refusals or 1
        return get(jobs, job_id)

    class Starting(Service):
        async def run(self) -> None:
            nonlocal loop
            loop = asyncio.get_running_loop()
            await super().run()

    loop: asyncio.AbstractEventLoop
    monkeypatch.setattr(foreground, "Service", Starting)
    monkeypatch.setattr(Jobs, "get", away)
    monkeypatch.setattr(History, "ranks", away)
    assert run(tmp_path) == 0
    assert refusals == 4


OTHER_SPECS = [
    ({"max_restarts": 0}, "max_restarts"),
    ({"restart_scope": "gang", "command": ("false",)}, "command, restart_scope"),
    ({"env": {"A": "b"}}, "env"),
    ({"world_size": 2}, "world_size"),
    ({"dataset_dir": "/elsewhere"}, "dataset_dir"),
]


@pytest.mark.usefixtures("may_complete")
def test_an_unfinished_job_resumes_only_with_its_own_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "Service", Interrupted)
    assert begin(tmp_path) == INTERRUPTED_CODE
    for fields, names in OTHER_SPECS:
        with pytest.raises(JobDiffers, match=names):
            begin(tmp_path, **fields)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(JobDiffers, match="working_dir"):
        begin(tmp_path)


def test_a_resumed_run_does_not_repeat_events(
    tmp_path: Path, may_complete: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(Listener, "heard", heard)
    monkeypatch.setattr(foreground, "Service", Interrupted)
    begin(tmp_path)
    assert heard == ["the job was submitted"]
    monkeypatch.setattr(foreground, "Service", Service)
    may_complete.set()
    assert begin(tmp_path) == 0
    assert heard == ["the job was submitted"]
    assert begin(tmp_path) == 0
    assert heard == ["the job was submitted"] * 2, "another job with the same id"


class Blocked(EventPrinter):
    """A terminal that does not read until `reads` is set."""

    def __init__(self, files: JobFiles) -> None:
        super().__init__(files)
        self.reads = threading.Event()
        self.shown: list[str] = []

    def show_output(self) -> None:
        self.reads.wait()

    def show_event(self, event: Event) -> None:
        self.shown.append(event.message)

    def show_end(self, job: Job) -> None:
        self.shown.append(job.status)


def test_a_terminal_that_reads_late_shows_everything(
    tmp_path: Path, may_complete: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = Blocked(JobFiles(tmp_path))

    class Eventful(Service):
        async def run(self) -> None:
            job = Jobs(self._database).get(JobId("one"))
            with self._database.writing() as connection:
                for number in range(5):
                    event = Event(at=job.created_at, kind="counted", message=str(number))
                    append_events(connection, job.job_id, [event])
            asyncio.get_running_loop().call_later(0.1, display.reads.set)
            await super().run()

    may_complete.set()
    monkeypatch.setattr(foreground, "Service", Eventful)
    monkeypatch.setattr(foreground, "EVENTS_LIMIT", 2)
    assert begin(tmp_path, lambda _: display) == 0
    assert display.shown == ["the job was submitted", *"01234", JobStatus.COMPLETED]


@pytest.mark.usefixtures("may_complete")
def test_a_terminal_that_never_reads_delays_no_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(Interruptible):
        async def run(self) -> None:
            asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
            await super().run()

    monkeypatch.setattr(foreground, "Service", Ending)
    monkeypatch.setattr(foreground, "LAST_OUTPUT_SECONDS", 0.1)
    display = Blocked(JobFiles(tmp_path))
    try:
        assert begin(tmp_path, lambda _: display) == INTERRUPTED_CODE
        assert display.shown == [JobStatus.QUEUED]
    finally:
        display.reads.set()


def test_a_broken_display_does_not_end_the_job(
    tmp_path: Path, may_complete: asyncio.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Listener):
        def show_output(self) -> None:
            raise ValueError("no terminal")

    may_complete.set()
    assert begin(tmp_path, Broken) == 0
    assert capsys.readouterr().err.count("no terminal") == 1
