"""What is said of an agent that has ended: once it is true, and for certain."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from stories import Story, exited

from coordinator import attendants
from coordinator.attendants import Attendants
from coordinator.charge import Charge
from coordinator.happenings import AgentLost, Happening
from coordinator.rows import Attachment
from muster.contracts.environ import ServiceSettings
from muster.contracts.exit_record import ExitRecord
from muster.contracts.job import JobUid
from muster.contracts.layout import DataDirectory
from muster.contracts.messages import RankExited
from muster.contracts.process import ProcessRecord
from muster.exit_records import write_own_account


class Floor:
    """Where nothing runs any more; `blind` sweeps meet a lack of descriptors."""

    def __init__(self, on_sweep: Callable[[], None], blind: int = 0) -> None:
        self._on_sweep = on_sweep
        self._blind = blind

    async def sweep(self, _job_uid: str, _known: Sequence[ProcessRecord]) -> None:
        if self._blind:
            self._blind -= 1
            raise OSError(24, "Too many open files")
        self._on_sweep()


def told_of(
    root: Path, blind: int = 0, look: Callable[[Attendants], None] = lambda _: None
) -> list[str]:
    """Return in order what happens once the agent of a job with one finished rank has ended."""
    job = Story.running(world_size=1).job
    charge = Charge(snapshot=job, attachment=Attachment(started_at=None))
    settings = ServiceSettings.read({"MUSTER_DATA_DIR": str(root)}, cores=2)
    files = DataDirectory(settings.data_dir).job(job.job_id)
    files.run.mkdir(parents=True)
    identity = job.ranks[0].identity
    assert identity is not None
    record = ExitRecord(pid=identity.pid, at="", said=(), exited=exited(0, 0, code=0))
    write_own_account(files, record)
    happened: list[str] = []

    async def in_office() -> bool:
        look(ours)
        return True

    async def serve(_charge: Charge) -> str:
        return "the agent has ended"

    def hear(_uid: JobUid, news: Happening) -> None:
        happened.append(type(news).__name__)
        if isinstance(news, AgentLost):
            assert news.living == frozenset()
        if isinstance(news, RankExited):
            assert news.exit_code == 0

    floor = Floor(lambda: happened.append("swept"), blind)
    ours = Attendants(floor, settings, in_office, clock=lambda: 7.0)
    asyncio.run(ours._attend(charge, hear, serve))  # noqa: SLF001
    look(ours)
    return happened


def test_an_end_is_told_when_nothing_is_left_of_it_and_before_its_agent_is_lost(
    tmp_path: Path,
) -> None:
    assert told_of(tmp_path) == ["swept", "RankExited", "AgentLost"]


def test_who_cannot_look_waits_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendants, "BLIND_PAUSE_SECONDS", 0.0)
    assert told_of(tmp_path, blind=2) == ["swept", "RankExited", "AgentLost"]


def test_since_when_nobody_can_see_is_known_until_somebody_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendants, "BLIND_PAUSE_SECONDS", 0.0)
    seen: list[float | None] = []
    told_of(tmp_path, blind=2, look=lambda ours: seen.append(ours.blind_since))
    assert seen == [None, 7.0, 7.0, None]
