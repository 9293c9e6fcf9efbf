"""Services that crash, hang and are ended at every moment; each is a small real process."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cli import keeper
from cli.keeper import Keeper

FOREVER = "import time; time.sleep(600)"
CRASH = "raise SystemExit(3)"


@pytest.fixture(autouse=True)
def _never_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause that is waited out fails its test."""
    monkeypatch.setattr(keeper, "PAUSE_SECONDS", 600.0)


def keep(
    program: str, say: Callable[[str], None] = pytest.fail, standstill_seconds: float = 600.0
) -> Keeper:
    command = [sys.executable, "-c", program]
    return Keeper("service", command, os.environ, say, standstill_seconds)


def kept(kept: Keeper, meanwhile: Coroutine[Any, Any, None]) -> int:
    """Return the code with which the service ends while `meanwhile` happens."""

    async def run() -> int:
        code, _ = await asyncio.gather(kept.run(), meanwhile)
        return code

    return asyncio.run(run())


async def nothing() -> None: ...


def test_a_service_that_gives_up_before_it_served_is_not_started_again() -> None:
    assert kept(keep(CRASH), nothing()) == 3


def test_a_service_that_dies_is_started_again_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "PAUSE_SECONDS", 0.0)
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        if len(said) == 3:
            service.end(signal.SIGTERM)

    service = keep("import os; os.kill(os.getpid(), 9)", say)
    assert kept(service, nothing()) == -signal.SIGKILL
    assert said == 3 * ["the service was ended by signal 9 (SIGKILL); it is started again"]


def test_an_end_during_the_pause_of_a_crash_loop_ends_it_at_once() -> None:
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        asyncio.get_running_loop().call_soon(service.end, signal.SIGINT)

    service = keep(CRASH, say)
    service.has_served = True
    assert kept(service, nothing()) == 3
    assert said == ["the service exited with code 3; it is started again"]


def test_a_service_that_is_being_started_hears_of_its_end() -> None:
    service = keep(FOREVER)

    async def end() -> None:
        service.end(signal.SIGTERM)

    # The service's turn is first, and it is in the midst of starting when ours comes.
    assert kept(service, end()) == -signal.SIGTERM


def test_what_was_ended_before_it_began_never_begins() -> None:
    service = keep(CRASH)
    service.end(signal.SIGINT)
    assert kept(service, nothing()) == 0


def test_a_stronger_signal_ends_what_did_not_hear_the_first(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    service = keep(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"pathlib.Path({str(ready)!r}).write_text('deaf')\n"
        "time.sleep(600)"
    )

    async def end_twice() -> None:
        assert await asyncio.to_thread(ready.read_text) == "deaf"
        service.end(signal.SIGINT)
        service.end(signal.SIGTERM)

    assert kept(service, end_twice()) == -signal.SIGTERM


def test_a_service_that_stands_still_is_ended_and_started_again() -> None:
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        if len(said) == 2:
            service.end(signal.SIGKILL)

    service = keep("import os; os.kill(os.getpid(), 19)", say, standstill_seconds=0.05)
    assert kept(service, nothing()) == -signal.SIGKILL
    assert "stood still" in said[0]
    assert "started again" in said[1]
