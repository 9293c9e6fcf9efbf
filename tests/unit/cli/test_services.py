"""`muster up` and `down`: what they print, and services that do not start or end."""

from pathlib import Path

import pytest

from cli.services import up as services
from cli.services.record import ServiceRecord
from cli.services.up import end_detached, next_steps, start_detached
from muster.contracts.errors import MusterError
from muster.contracts.paths import DataDir
from muster.contracts.settings import AccessSettings
from muster.host.processes import this_process


@pytest.mark.parametrize(
    ("environ", "lines"),
    [
        ({}, []),
        ({"MUSTER_PORT": "8001"}, []),
        ({"MUSTER_REQUIRE_TOKEN": "1"}, ["export MUSTER_TOKEN=…"]),
    ],
)
def test_next_steps_export_what_is_unusual(environ: dict[str, str], lines: list[str]) -> None:
    steps = list(next_steps(Path("/my data"), AccessSettings.read(environ)))
    exports = [line for line in steps if line.startswith("export MUSTER_")]
    assert exports == [*lines, "export MUSTER_DATA_DIR='/my data'"]


def test_next_steps_activate_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "my env" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").touch()
    monkeypatch.setattr("sys.prefix", str(programs.parent))
    first = next(next_steps(Path("/data"), AccessSettings.read({})))
    assert first == f"source '{programs}/activate'"


def test_services_that_end_at_once_are_reported_with_their_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        services, "module_command", lambda *_: ["/bin/sh", "-c", "echo no luck; exit 1"]
    )
    monkeypatch.setattr("muster.host.files.LOG_LIMIT_BYTES", 10)
    files = DataDir(tmp_path)
    files.services_log.write_text("a long log of long ago\n")
    with pytest.raises(MusterError, match=f"log is {files.services_log}:\nno luck$"):
        start_detached(files, {})
    assert files.services_log.read_text() == "no luck\n"
    assert Path(f"{files.services_log}.1").read_text() == "a long log of long ago\n"


def test_services_of_another_user_are_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("cli.services.up.send_signal", refuse)
    record = ServiceRecord(url="http://h", process=this_process(), log=None, is_ending=False)
    with pytest.raises(MusterError, match="another user"):
        end_detached(record)
