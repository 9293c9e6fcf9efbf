"""An agent that is dismissed before it was ever heard: it goes, or there never is one."""

import asyncio
import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

import pytest
from stories import Story

from coordinator import attendants
from coordinator.actions import DismissAgent
from coordinator.attendants import Attendants
from coordinator.charge import Charge
from coordinator.happenings import AgentLost, Condemned, Happening
from coordinator.launcher import AgentProcess
from coordinator.preparation import Places, Unprepared
from coordinator.rows import Attachment
from coordinator.snapshot import Verdict
from muster.contracts.agent import AgentAssignment
from muster.contracts.environ import ServiceSettings
from muster.contracts.job import JobUid, Reason
from muster.contracts.layout import DataDirectory
from muster.contracts.process import ProcessRecord

PATIENCE_SECONDS = 20.0


class Yard:
    """Where agents run until they are killed; `on_start` is called while one is being started."""

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self.deeds: list[str] = []
        self.descriptors_missing = 0
        """So often nobody can be ended for lack of them."""

    async def start(self, _assignment: AgentAssignment) -> AgentProcess:
        self.deeds.append("started")
        self._on_start()
        return AgentProcess(record=None, ended=asyncio.get_running_loop().create_future())

    async def kill(self, agent: AgentProcess) -> None:
        if self.descriptors_missing:
            self.descriptors_missing -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        self.deeds.append("killed")
        agent.ended.set_result(-9)

    async def sweep(self, _job_uid: str, _known: Sequence[ProcessRecord]) -> None:
        self.deeds.append("swept")


class Admission:
    """A job that was let in, and is dismissed at one moment of its agent's start."""

    def __init__(self, root: Path, moment: str) -> None:
        self._story = Story.submitted(world_size=1).is_admitted()
        self._story.plans()
        job = self._story.job
        settings = ServiceSettings.read({"MUSTER_DATA_DIR": str(root)}, cores=2)
        self.files = DataDirectory(settings.data_dir).job(job.job_id)
        self.news: list[Happening] = []
        self.disk = Event()
        """Set once it answers."""
        self.yard = Yard(self._is_starting)
        self._charge = Charge(snapshot=job, attachment=Attachment(started_at=None))
        self._attendants = Attendants(self.yard, settings, _always)
        self._moment = moment
        self._dismissed = Event()
        self._told = asyncio.Event()

    async def goes(self) -> None:
        """Start the agent, and wait until it is said to be gone."""
        self._loop = asyncio.get_running_loop()
        self._attendants.start(self._charge, self._hear)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._told.wait()
        self.disk.set()

    def comes(self, moment: str) -> None:
        if moment == self._moment and not self._dismissed.is_set():
            self._charge.snapshot = self._story.takes(DismissAgent()).job
            self._attendants.see_off(self._charge)
            self._dismissed.set()

    def _is_starting(self) -> None:
        self.comes("starting")
        self._loop.call_soon(self.comes, "started")

    def comes_elsewhere(self, moment: str) -> None:
        """Be in a thread at that moment."""
        if moment == self._moment:
            self._loop.call_soon_threadsafe(self.comes, moment)
            assert self._dismissed.wait(PATIENCE_SECONDS)

    def _hear(self, _uid: JobUid, news: Happening) -> None:
        self.news.append(news)
        if isinstance(news, AgentLost):
            self._told.set()


async def _always() -> bool:
    return True


@pytest.mark.parametrize(
    ("moment", "deeds"),
    [
        ("preparing", ["swept"]),
        ("claiming", ["swept"]),
        ("starting", ["started", "killed", "swept"]),
        ("started", ["started", "killed", "swept"]),
    ],
)
def test_an_agent_may_be_dismissed_at_any_moment_of_its_start(
    moment: str, deeds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = Admission(tmp_path, moment)

    def prepare(*_: object) -> Places:
        admission.comes_elsewhere("preparing")
        if moment == "preparing":
            assert admission.disk.wait(PATIENCE_SECONDS), "nobody waits for a disk that hangs"
        return Places(dataset_dir=tmp_path, checkpoint_dir=tmp_path, working_dir=tmp_path)

    def claim(*_: object) -> None:
        admission.files.root.mkdir(parents=True)
        admission.comes_elsewhere("claiming")

    monkeypatch.setattr(attendants, "prepare", prepare)
    monkeypatch.setattr(attendants, "claim", claim)
    monkeypatch.setattr(attendants, "FAREWELL_SECONDS", 0.0)
    asyncio.run(admission.goes())
    assert admission.yard.deeds == deeds
    assert [type(news) for news in admission.news] == [AgentLost]
    assert admission.files.root.exists() == (moment != "preparing")


def test_an_agent_that_cannot_be_ended_yet_is_ended_as_soon_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = Admission(tmp_path, "started")
    admission.yard.descriptors_missing = 2
    places = Places(dataset_dir=tmp_path, checkpoint_dir=tmp_path, working_dir=tmp_path)
    monkeypatch.setattr(attendants, "prepare", lambda *_: places)
    monkeypatch.setattr(attendants, "FAREWELL_SECONDS", 0.0)
    asyncio.run(admission.goes())
    assert admission.yard.deeds == ["started", "killed", "swept"]
    assert not admission.yard.descriptors_missing


def test_what_cannot_be_prepared_has_no_agent_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = Admission(tmp_path, moment="never")

    def prepare(*_: object) -> Places:
        raise Unprepared(Verdict(reason=Reason.INVALID_DATASET, message="there is no data"))

    monkeypatch.setattr(attendants, "prepare", prepare)
    asyncio.run(admission.goes())
    assert [type(news) for news in admission.news] == [Condemned, AgentLost]
    assert admission.yard.deeds == []
