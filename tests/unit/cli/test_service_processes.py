"""Services that crash, hang and are ended at any moment; each is a small real process."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cli.services import processes as service_processes
from cli.services.processes import Service

FOREVER = "import time; time.sleep(600)"
CRASH = "raise SystemExit(3)"


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that waits for the pause between two starts fails."""
    monkeypatch.setattr(service_processes, "PAUSE_SECONDS", 600.0)


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

    monkeypatch.setattr(service_processes, "say", say)
    return said


def test_service_that_fails_before_it_served_is_not_restarted() -> None:
    assert run(service(CRASH)) == 3


def test_service_that_dies_is_restarted_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_processes, "PAUSE_SECONDS", 0.0)
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
