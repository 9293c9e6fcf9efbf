"""`muster up`: services that crash, hang and are ended at any moment, and what it prints.

Each service is a small real process.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cli import services
from cli.service_record import ServiceRecord
from cli.services import Service, end_detached, next_steps, start_detached
from muster.contracts.errors import MusterError
from muster.contracts.paths import DataDir
from muster.contracts.settings import AccessSettings
from muster.host.processes import this_process

FOREVER = "import time; time.sleep(600)"
CRASH = "raise SystemExit(3)"


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that waits for the pause between two starts fails."""
    monkeypatch.setattr(services, "PAUSE_SECONDS", 600.0)


def service(program: str) -> Service:
    return Service("service", [sys.executable, "-c", program], os.environ)


def run(service: Service, meanwhile: Coroutine[Any, Any, None] | None = None) -> int:
    """Return the code with which the service ends while `meanwhile` happens."""

    async def both() -> int:
        code, *_ = await asyncio.gather(service.run(), *([meanwhile] if meanwhile else []))
        return code

    return asyncio.run(both())


def on_message(monkeypatch: pytest.MonkeyPatch, react: Callable[[list[str]], None]) -> list[str]:
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        react(said)

    monkeypatch.setattr(services, "say", say)
    return said


def test_service_that_fails_before_it_served_is_not_restarted() -> None:
    assert run(service(CRASH)) == 3


def test_service_that_dies_is_restarted_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "PAUSE_SECONDS", 0.0)
    dying = service("import os; os.kill(os.getpid(), 9)")
    said = on_message(monkeypatch, lambda said: len(said) == 3 and dying.end(signal.SIGTERM))
    assert run(dying) == -signal.SIGKILL
    assert said == 3 * ["the service was ended by signal 9 (SIGKILL); it is started again"]


def test_end_during_the_pause_of_a_crash_loop_is_immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    crashing = service(CRASH)
    crashing.has_served = True

    def end_soon(_: list[str]) -> None:
        asyncio.get_running_loop().call_soon(crashing.end, signal.SIGINT)

    said = on_message(monkeypatch, end_soon)
    assert run(crashing) == 3
    assert said == ["the service exited with code 3; it is started again"]


def test_service_that_is_just_starting_receives_its_end() -> None:
    starting = service(FOREVER)

    async def end() -> None:
        starting.end(signal.SIGTERM)

    # The service runs first, and is being created when `end` runs.
    assert run(starting, end()) == -signal.SIGTERM


def test_service_ended_before_its_start_never_starts() -> None:
    never = service(CRASH)
    never.end(signal.SIGINT)
    assert run(never) == 0


def test_stronger_signal_ends_a_service_that_ignored_the_first(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    deaf = service(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"pathlib.Path({str(ready)!r}).write_text('deaf')\n"
        "time.sleep(600)"
    )

    async def end_twice() -> None:
        assert await asyncio.to_thread(ready.read_text) == "deaf"
        deaf.end(signal.SIGINT)
        deaf.end(signal.SIGTERM)

    assert run(deaf, end_twice()) == -signal.SIGTERM


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

    monkeypatch.setattr("cli.services.send_signal", refuse)
    record = ServiceRecord(url="http://h", process=this_process(), log=None, is_ending=False)
    with pytest.raises(MusterError, match="another user"):
        end_detached(record)
