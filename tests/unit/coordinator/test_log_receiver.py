"""The thread that writes logs of other hosts."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.agents import log_receiver
from coordinator.agents.log_receiver import Disk


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_receiver, "FULL_PAUSE_SECONDS", 0.0)
    places = [tmp_path / "log", *[Path("/dev/full")] * 3]

    def write() -> int:
        return places.pop().write_bytes(b"a line\n")

    async def take() -> int:
        disk = Disk()
        try:
            return await disk.do(write)
        finally:
            disk.close()

    with capture_logs() as logged:
        assert asyncio.run(take()) == len(b"a line\n")
    assert [entry["action"] for entry in logged] == ["logs_wait"]


def test_other_errors_of_the_disk_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(Disk().do((tmp_path / "missing").read_bytes))
