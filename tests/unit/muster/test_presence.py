"""What a rank says to its agent and does, whether or not a person can be told."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import pytest
from ranks import Ear, settings_of
from stories import beat

from muster.checkpoints.errors import CheckpointDamaged
from muster.contracts.endings import REPLACED_CODE
from muster.contracts.messages import Hello, Refused, Warned
from muster.presence import Presence

SUPERVISED = """
import sys, time
from pathlib import Path
from ranks import settings_of
from stories import beat
from muster.line import Line
from muster.presence import Presence
from muster.voice import Voice
root, channel = Path(sys.argv[1]), int(sys.argv[2])
voice = Voice(Line(channel, root / "agent.0001.sock"))
Presence(voice, settings_of(root), lambda stopping: beat()).start()
time.sleep(600)
"""


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()


@pytest.fixture
def full_disk() -> Iterator[TextIO]:
    with Path("/dev/full").open("wb", buffering=0) as full:
        yield TextIOWrapper(full, write_through=True)


def presence_of(ear: Ear, directory: Path) -> Presence:
    return Presence(ear.voice, settings_of(directory), lambda _stopping: beat())


def test_a_warning_is_for_the_log_and_for_the_agent(
    ear: Ear, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    presence_of(ear, tmp_path).warn("careful")
    assert ear.heard() == [Warned(message="careful")]
    assert capfd.readouterr().err == "muster: warning: careful\n"


def test_a_warning_reaches_the_agent_when_the_log_is_full(
    ear: Ear, tmp_path: Path, full_disk: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", full_disk)
    presence_of(ear, tmp_path).warn("careful")
    assert ear.heard() == [Warned(message="careful")]


def test_a_refusal_reaches_the_agent_when_the_log_is_full(
    ear: Ear, tmp_path: Path, full_disk: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", full_disk)
    presence_of(ear, tmp_path)._last_word(CheckpointDamaged, CheckpointDamaged("torn"), None)  # noqa: SLF001  as the interpreter calls it
    (refused,) = ear.heard()
    assert isinstance(refused, Refused)


@pytest.mark.slow
def test_a_rank_that_was_replaced_leaves_when_the_log_is_full(ear: Ear, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with Path("/dev/full").open("wb") as full:
        rank = subprocess.Popen(
            [sys.executable, "-c", SUPERVISED, str(tmp_path), str(ear.descriptor)],
            stdout=full,
            stderr=full,
            env=environment,
            pass_fds=(ear.descriptor,),
        )
    with rank:
        deadline = threading.Timer(60.0, rank.kill)
        deadline.start()
        assert ear.hear() == Hello()
        (tmp_path / "agent.0002.sock").touch()
        assert rank.wait() == REPLACED_CODE
        deadline.cancel()
