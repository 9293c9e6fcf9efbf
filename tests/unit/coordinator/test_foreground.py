"""One job without a service: what is stored of it, and a database that is away now and then."""

import asyncio
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from store_samples import bring_to

from coordinator import foreground
from coordinator.attention import Attention
from coordinator.foreground import Audience, Narrator
from muster.contracts.endings import INTERRUPTED_CODE
from muster.contracts.environ import ServiceSettings
from muster.contracts.errors import BegunOtherwise
from muster.contracts.job import JobId, JobStatus
from muster.contracts.layout import DataDirectory, JobFiles
from muster.contracts.spec import JobSpec
from store.database import Database
from store.errors import StoreUnavailable
from store.events import Events
from store.jobs import Jobs
from store.records import Event, Job
from store.rows import append_event
from store.workers import Workers

PATH = (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.COMPLETED)


class Service:
    """Stands in for a coordinator: completes the job as soon as `may_complete` says so."""

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


@pytest.fixture
def may_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    event = asyncio.Event()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Service, "may_complete", event)
    monkeypatch.setattr(foreground, "Service", Service)
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # it is ours, and all tests'
    return event


class Interrupted(Service):
    """Ends before the job does."""

    async def run(self) -> None:
        bring_to(self._database, Jobs(self._database).get(JobId("one")), JobStatus.STARTING)


class Interruptible(Service):
    """Works until somebody asks for an end."""

    async def run(self) -> None:
        await self._asked_to_end.wait()


class Listener(Narrator):
    """Hears what the events say; nobody else does."""

    heard: ClassVar[list[str]] = []

    def hear(self, event: Event) -> None:
        self.heard.append(event.message)


def begin(
    tmp_path: Path, audience: Callable[[JobFiles], Audience] = Listener, **fields: object
) -> int:
    """Run a job of this spec, or go on with it."""
    spec = JobSpec(**{"command": ("true",), "world_size": 1, **fields})
    environ = {"MUSTER_DATA_DIR": str(tmp_path / "state")}
    settings = ServiceSettings.read(environ, cores=2)
    return foreground.play(JobId("one"), spec, settings, environ, audience)


def run(tmp_path: Path) -> int:
    environ = {"JOB_ID": "one", "MUSTER_DATA_DIR": str(tmp_path / "state")}
    return foreground.run(ServiceSettings.read(environ, cores=2), environ)


def test_the_job_is_complete_before_it_is_stored(
    tmp_path: Path, may_complete: asyncio.Event
) -> None:
    may_complete.set()
    assert run(tmp_path) == 0
    own = tmp_path / "state" / "foreground" / "one"
    database = Database.open(f"sqlite:///{own}/muster.db")
    try:
        job = Jobs(database).get(JobId("one"))
    finally:
        database.close()
    assert job.spec.dataset_dir == str(own / "datasets" / "synthetic")
    assert job.spec.working_dir == str(tmp_path)


def test_a_database_that_is_away_for_a_while_does_not_end_the_job(
    tmp_path: Path, may_complete: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = Jobs.get
    refusals = 0

    def away(jobs: Jobs, job_id: JobId) -> Job:
        nonlocal refusals
        # `run` and the coordinator begin well; it is the looks in between that fail.
        if 0 < refusals < 4:
            refusals += 1
            if refusals == 4:
                loop.call_soon_threadsafe(may_complete.set)
            raise StoreUnavailable("away")
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
    monkeypatch.setattr(Workers, "of_job", away)
    assert run(tmp_path) == 0
    assert refusals == 4


OTHERWISE = [
    ({"max_restarts": 0}, "another max_restarts, and"),
    ({"restart_scope": "gang", "command": ("false",)}, "another command, restart_scope, and"),
    ({"env": {"A": "b"}}, "another env, and"),
    ({"world_size": 2}, "another world_size, and"),
    ({"dataset_dir": "/elsewhere"}, "another dataset_dir, and"),
]


@pytest.mark.usefixtures("may_complete")
def test_a_job_that_is_not_over_goes_on_only_as_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "Service", Interrupted)
    assert begin(tmp_path) == INTERRUPTED_CODE
    for fields, sentence in OTHERWISE:
        with pytest.raises(BegunOtherwise, match=sentence):
            begin(tmp_path, **fields)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(BegunOtherwise, match="another working_dir, and"):
        begin(tmp_path)


@pytest.mark.usefixtures("may_complete")
def test_who_stores_the_same_job_a_moment_later_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "Service", Interrupted)
    assert begin(tmp_path) == INTERRUPTED_CODE
    monkeypatch.setattr(Jobs, "find", lambda *_: None)  # it was not there when they looked
    assert begin(tmp_path) == INTERRUPTED_CODE
    with pytest.raises(BegunOtherwise, match="another world_size, and"):
        begin(tmp_path, world_size=2)


def test_who_replaces_the_same_job_a_moment_later_goes_on_with_the_new_one(
    tmp_path: Path, may_complete: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_complete.set()
    assert begin(tmp_path) == 0
    monkeypatch.setattr(foreground, "Service", Interrupted)
    find = Jobs.find
    begun = DataDirectory(tmp_path / "state" / "foreground" / "one").job("one").run

    def find_too_early(jobs: Jobs, job_id: JobId) -> Job | None:
        earlier = find(jobs, job_id)
        monkeypatch.setattr(Jobs, "find", find)
        assert begin(tmp_path) == INTERRUPTED_CODE
        begun.mkdir(parents=True)
        return earlier

    monkeypatch.setattr(Jobs, "find", find_too_early)
    assert begin(tmp_path) == INTERRUPTED_CODE
    assert begun.exists(), "it is the new job's"
    with pytest.raises(BegunOtherwise, match="another world_size, and"):
        begin(tmp_path, world_size=2)


def test_what_was_told_is_not_told_again_by_a_run_that_goes_on(
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
    assert heard == ["the job was submitted"] * 2, "another job, of the same id"


class Asleep(Narrator):
    """Looks at nothing until it is woken; what it hears and learns is noted down."""

    def __init__(self, files: JobFiles) -> None:
        super().__init__(files)
        self.awake = threading.Event()
        self.noted: list[str] = []

    def look(self) -> None:
        self.awake.wait()

    see_rest = look

    def miss_rest(self) -> None:
        self.noted.append("there is more")

    def hear(self, event: Event) -> None:
        self.noted.append(event.message)

    def conclude(self, job: Job) -> None:
        self.noted.append(job.status)


class Ending(Asleep):
    """Asks for an end of all that it hears of."""

    def hear(self, event: Event) -> None:
        super().hear(event)
        os.kill(os.getpid(), signal.SIGTERM)


def test_what_happens_is_heard_while_nobody_looks(
    tmp_path: Path, may_complete: asyncio.Event
) -> None:
    class Woken(Asleep):
        def hear(self, event: Event) -> None:
            super().hear(event)
            self.awake.set()

    audience = Woken(JobFiles(tmp_path))
    may_complete.set()
    assert begin(tmp_path, lambda _: audience) == 0
    assert audience.noted == ["the job was submitted", JobStatus.COMPLETED]


@pytest.mark.usefixtures("may_complete")
def test_who_asks_for_an_end_has_it_although_nobody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "Service", Interruptible)
    audience = Ending(JobFiles(tmp_path))
    monkeypatch.setattr(foreground, "FAREWELL_SECONDS", foreground.LAST_WORDS_SECONDS)
    try:
        assert begin(tmp_path, lambda _: audience) == INTERRUPTED_CODE
        assert audience.noted[0] == "the job was submitted"
        assert audience.noted[-2:] == ["there is more", JobStatus.QUEUED]
    finally:
        audience.awake.set()


@pytest.mark.usefixtures("may_complete")
def test_the_patience_with_who_neither_looks_nor_hears_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(Ending):
        def hear(self, event: Event) -> None:
            super().hear(event)
            self.awake.wait()

    patience: list[float] = []
    wait = Attention.wait

    async def noted(attention: Attention, patience_seconds: float | None = None) -> None:
        if patience_seconds not in {None, foreground.LOOK_SECONDS}:
            patience.append(patience_seconds)
        await wait(attention, patience_seconds)

    monkeypatch.setattr(Attention, "wait", noted)
    monkeypatch.setattr(foreground, "Service", Interruptible)
    monkeypatch.setattr(foreground, "FAREWELL_SECONDS", 0.06)
    monkeypatch.setattr(foreground, "LAST_WORDS_SECONDS", 0.02)
    audience = Deaf(JobFiles(tmp_path))
    try:
        assert begin(tmp_path, lambda _: audience) == INTERRUPTED_CODE
    finally:
        audience.awake.set()
    for_sight, for_hearing = patience
    assert for_sight == pytest.approx(0.04)
    assert for_hearing < 0.021


@pytest.mark.parametrize("counted", [["0", "1", "2", "3", "4"], []], ids=["there", "away"])
def test_who_hears_late_hears_all_that_can_be_told(
    tmp_path: Path,
    may_complete: asyncio.Event,
    monkeypatch: pytest.MonkeyPatch,
    counted: list[str],
) -> None:
    class Late(Asleep):
        """Does not hear the first thing to its end until all is over."""

        def look(self) -> None:
            """See nothing, at once."""

        def see_rest(self) -> None:
            if not counted:
                monkeypatch.setattr(Events, "following", away)
            self.awake.set()

        def hear(self, event: Event) -> None:
            super().hear(event)
            loop.call_soon_threadsafe(may_complete.set)
            self.awake.wait()

    class Eventful(Service):
        async def run(self) -> None:
            nonlocal loop
            loop = asyncio.get_running_loop()
            await self.may_complete.wait()
            job = Jobs(self._database).get(JobId("one"))
            with self._database.writing() as connection:
                for number in range(5):
                    told = Event(at=job.created_at, kind="counted", message=str(number))
                    append_event(connection, job.job_id, told)
            await super().run()

    def away(*_: object) -> list[Event]:
        raise StoreUnavailable("away")

    loop: asyncio.AbstractEventLoop
    monkeypatch.setattr(foreground, "Service", Eventful)
    monkeypatch.setattr(foreground, "EVENTS_LIMIT", 2)
    audience = Late(JobFiles(tmp_path))
    assert begin(tmp_path, lambda _: audience) == 0
    assert audience.noted == ["the job was submitted", *counted, JobStatus.COMPLETED]
