"""Heartbeats, SIGTERM and errors of a supervised process."""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import dropwhile, islice
from pathlib import Path

import msgspec
import pytest

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointMismatch,
    CheckpointNotWritable,
    OtherData,
    StaleGeneration,
    UnsupportedState,
)
from muster.contracts.errors import MusterError
from muster.contracts.job.retry import REPLACED_CODE
from muster.contracts.job.status import Reason
from muster.contracts.messages.rank import (
    Code,
    Heartbeat,
    Hello,
    Orphaned,
    PermanentFailure,
    Raised,
    RankMessage,
    Warned,
)
from muster.contracts.messages.wire import encode
from muster.contracts.rank import Phase
from muster.contracts.settings.names import HAS_JOINED
from muster.datasets.errors import (
    DatasetEmpty,
    DatasetError,
    DatasetMissing,
    InvalidSample,
    ShardChanged,
    ShardUnreadable,
)
from muster.runtime.heartbeat import (
    LAST_REPORT_SECONDS,
    MESSAGE_LIMIT,
    Supervision,
    permanent_error,
)
from muster.runtime.redaction import Redaction
from tests.support.agents import Agents
from tests.support.installation import await_value
from tests.support.ranks import PATIENCE_SECONDS, Ear, settings_of
from tests.support.stories import beat

OFTEN_SECONDS = 0.001
NEVER_SECONDS = 3600.0

SUPERVISIONS: list[Supervision] = []
"""Whose threads end with the test."""


class Replaced(Exception):
    """The process would exit."""


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a supervision does to its process."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv(HAS_JOINED, "")
    monkeypatch.setattr(atexit, "register", lambda _stop: None)
    yield
    signal.signal(signal.SIGTERM, handler)
    while SUPERVISIONS:
        SUPERVISIONS.pop().close()


def supervision_of(
    ear: Ear, interval: float = OFTEN_SECONDS, orphan_timeout: float = NEVER_SECONDS
) -> Supervision:
    settings = msgspec.structs.replace(
        settings_of(Path("/")), heartbeat_seconds=interval, orphan_timeout_seconds=orphan_timeout
    )
    supervision = Supervision(ear.voice, settings, lambda stopping: beat(7, stopping=stopping))
    SUPERVISIONS.append(supervision)
    return supervision


def next_of(ear: Ear, count: int) -> list[RankMessage]:
    """Return the next messages, without the code of this process, which is that of the tests."""
    received = (message for message in iter(ear.receive, None) if not isinstance(message, Code))
    return [*islice(received, count)]


def test_heartbeats_go_on_while_the_process_exits(ear: Ear) -> None:
    supervision = supervision_of(ear)
    supervision.start()
    assert next_of(ear, 4) == [Hello(python=sys.executable), *[beat(step=7)] * 3]
    supervision.report_exit()
    phases = (beat.phase for beat in iter(ear.receive, None) if isinstance(beat, Heartbeat))
    exiting = dropwhile(lambda phase: phase is not Phase.EXITING, phases)
    assert [*islice(exiting, 3)] == [Phase.EXITING] * 3


@pytest.mark.parametrize(
    ("complete", "failed", "stopping", "phase"),
    [
        (True, False, False, Phase.FINISHED),
        (False, False, False, Phase.EXITING),
        (True, True, False, Phase.EXITING),
        (True, False, True, Phase.EXITING),
    ],
)
def test_only_a_complete_undisturbed_process_has_finished(
    ear: Ear, *, complete: bool, failed: bool, stopping: bool, phase: Phase
) -> None:
    supervision = supervision_of(ear, NEVER_SECONDS)
    supervision.is_complete, supervision.has_failed = complete, failed
    supervision.is_stopping = stopping
    supervision.report_exit()
    assert ear.received() == [beat(step=7, stopping=stopping, phase=phase)]


@pytest.mark.parametrize(
    ("complete", "error", "raised"),
    [
        (True, OSError("disk full"), ["the script raised OSError: disk full after the loop"]),
        (True, AssertionError(), ["the script raised AssertionError after the loop"]),
        (True, KeyboardInterrupt(), []),
        (False, OSError("disk full"), []),
    ],
)
def test_an_error_after_the_loop_is_reported(
    ear: Ear, *, complete: bool, error: BaseException, raised: list[str]
) -> None:
    supervision = supervision_of(ear, NEVER_SECONDS)
    supervision.start()
    supervision.is_complete = complete
    sys.excepthook(type(error), error, None)
    assert [it for it in ear.received() if isinstance(it, Raised)] == [
        Raised(step=7, message=message) for message in raised
    ]


def test_a_fork_of_the_program_does_not_report_its_exit(ear: Ear) -> None:
    supervision = supervision_of(ear, NEVER_SECONDS)
    if (child := os.fork()) == 0:
        supervision.report_exit()
        os._exit(0)
    os.waitpid(child, 0)
    assert ear.received() == []


def test_reports_are_limited_in_rate_and_the_last_one_is_sent(ear: Ear) -> None:
    supervision = supervision_of(ear, NEVER_SECONDS)
    for _ in range(100):
        supervision.report()
    assert 1 <= len(ear.received()) < 50
    supervision.report_exit()
    assert ear.received() == [beat(step=7, phase=Phase.EXITING)]


def test_a_heartbeat_is_sent_without_values_that_do_not_fit(ear: Ear) -> None:
    supervision = supervision_of(ear, NEVER_SECONDS)
    supervision.recorder.take(1, {f"{number}{'n' * 1000}": 1.0 for number in range(66)})
    supervision.report()
    assert ear.received() == [beat(step=7)]


def test_values_that_could_not_be_sent_come_with_the_next(agents: Agents) -> None:
    supervision = supervision_of(agents, NEVER_SECONDS)
    agents.dies()
    for step in (1, 2, 3):
        supervision.recorder.take(step, {"loss": float(step)})
        supervision.report_next()
        supervision.report()
    agents.starts()
    stopping = threading.Thread(target=supervision.report_exit)
    stopping.start()
    agents.accepts()
    first, last = agents.receive(), agents.receive()
    assert isinstance(first, Heartbeat)
    assert isinstance(last, Heartbeat)
    assert first.window is None, "an agent gets it again, its values not"
    assert last.window is not None
    assert (last.window.since, last.window.step) == (0, 3)
    stopping.join(PATIENCE_SECONDS)


def test_the_thread_reconnects_to_the_next_agent(agents: Agents) -> None:
    supervision = supervision_of(agents, orphan_timeout=PATIENCE_SECONDS)
    supervision.start()
    agents.dies()
    agents.starts()
    agents.accepts()
    assert next_of(agents, 2) == [Hello(python=sys.executable), beat(step=7)]
    supervision.report_exit()
    supervision.close()
    assert not supervision.is_stopping


def test_without_a_new_agent_the_process_stops_itself(agents: Agents) -> None:
    supervision = supervision_of(agents, orphan_timeout=0.05)
    supervision.start()
    agents.dies()
    await_value(lambda: supervision.is_stopping, lambda: "it was not asked to stop")
    before = time.monotonic()
    supervision.report_exit()
    assert time.monotonic() < before + LAST_REPORT_SECONDS, "it does not wait for an agent"
    supervision.close()
    said = supervision._client.state()  # noqa: SLF001  for a later agent
    assert Orphaned(by="itself (no agent for 0.05 s)") in said


def test_the_final_state_waits_for_a_new_agent(agents: Agents) -> None:
    agents.dies()
    stopping = threading.Thread(target=supervision_of(agents).report_exit)
    stopping.start()
    agents.starts()
    agents.accepts()
    assert agents.receive() == beat(step=7, phase=Phase.EXITING)
    stopping.join(PATIENCE_SECONDS)
    assert not stopping.is_alive()


def test_a_process_replaced_after_its_last_step_exits(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise Replaced(code)

    monkeypatch.setattr(os, "_exit", leave)
    agents.are_succeeded()
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", TextIOWrapper(full, write_through=True))
        with pytest.raises(Replaced) as replaced:
            supervision_of(agents).report_exit()
    assert replaced.value.args == (REPLACED_CODE,)
    assert agents.receive() == Orphaned(by="itself (a newer agent's socket is there)")


def test_a_warning_goes_to_the_log_and_the_agent(
    ear: Ear, capfd: pytest.CaptureFixture[str]
) -> None:
    supervision_of(ear).warn("careful")
    assert ear.received() == [Warned(message="careful")]
    assert capfd.readouterr().err == "muster: warning: careful\n"


def test_warnings_and_errors_reach_the_agent_with_a_full_log(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", TextIOWrapper(full, write_through=True))
        supervision = supervision_of(ear)
        supervision.warn("careful")
        supervision._report_error(CheckpointDamaged, CheckpointDamaged("torn"), None)  # noqa: SLF001  as the interpreter calls it
    warned, exiting, refused = ear.received()
    assert warned == Warned(message="careful")
    assert exiting == beat(step=7, phase=Phase.EXITING), "peers do not wait for exit handlers"
    assert isinstance(refused, PermanentFailure)


# Errors

HERE = Path("/data")
SHARD = HERE / "shard_00000.txt"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DatasetMissing(HERE, "does not exist"), Reason.INVALID_DATASET),
        (DatasetEmpty(HERE, "holds no shard"), Reason.INVALID_DATASET),
        (ShardUnreadable(SHARD, OSError(13, "denied")), Reason.INVALID_DATASET),
        (ShardChanged(SHARD, "has 1 lines"), Reason.INVALID_DATASET),
        (InvalidSample(SHARD, 3, "no sample", b"x"), Reason.INVALID_DATASET),
        (CheckpointDamaged("damaged"), Reason.INVALID_CHECKPOINT),
        (CheckpointMismatch("of another rank"), Reason.INVALID_CHECKPOINT),
        (OtherData("lines 9, and 8 here"), Reason.INVALID_CHECKPOINT),
        (CheckpointNotWritable("read only"), Reason.INVALID_CHECKPOINT),
        (UnsupportedState("holds a lambda"), Reason.INVALID_PROGRAM),
        (CheckpointFailed("the disk is full"), None),
        (StaleGeneration("/checkpoints", 1, 2), None),
        (MusterError("anything else"), None),
    ],
)
def test_only_permanent_errors_are_reported(error: MusterError, reason: Reason | None) -> None:
    found = permanent_error(error, Redaction())
    assert (found and (found.reason, found.message)) == (reason and (reason, str(error)))
    is_of_data = isinstance(error, OtherData | DatasetError) and type(error) is not InvalidSample
    assert (found is not None and found.is_of_data) is is_of_data


def test_a_long_error_is_redacted_and_then_cut() -> None:
    value = "correct horse battery staple"
    whole = str(DatasetEmpty(HERE, ""))
    long = "\N{SNOWMAN}" * (MESSAGE_LIMIT - len(whole) - 15) + value
    error = DatasetEmpty(HERE, long + "x" * 100_000)
    refused = permanent_error(error, Redaction([value]))
    assert refused is not None
    assert "correct" in str(error)[:MESSAGE_LIMIT], "the cut is within the secret"
    assert "correct" not in refused.message
    assert len(encode(refused)) < 1 << 16, "it fits into the channel"
