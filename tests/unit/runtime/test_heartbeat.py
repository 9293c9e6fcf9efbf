"""Heartbeats, SIGTERM and errors of a supervised process."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import pytest

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointMismatch,
    CheckpointNotWritable,
    StaleGeneration,
    UnsupportedState,
)
from muster.contracts.errors import MusterError
from muster.contracts.job import Reason
from muster.contracts.messages import Hello, PermanentFailure, Warned
from muster.contracts.retry import REPLACED_CODE
from muster.contracts.wire import encode
from muster.datasets.errors import (
    DatasetEmpty,
    DatasetMissing,
    InvalidSample,
    ShardChanged,
    ShardUnreadable,
)
from muster.runtime.agent_client import AgentClient
from muster.runtime.heartbeat import (
    MESSAGE_LIMIT,
    HeartbeatThread,
    Supervision,
    permanent_error,
)
from muster.runtime.redaction import Redaction
from tests.support.agents import PATIENCE_SECONDS, Agents
from tests.support.ranks import Ear, settings_of
from tests.support.stories import beat

OFTEN_SECONDS = 0.001
NEVER_SECONDS = 3600.0


def heartbeat_of(
    client: AgentClient,
    *,
    interval: float = OFTEN_SECONDS,
    orphan_timeout: float = NEVER_SECONDS,
    on_orphaned: Callable[[], None] = lambda: None,
    on_replaced: Callable[[], None] = lambda: None,
) -> HeartbeatThread:
    return HeartbeatThread(
        client,
        lambda: beat(step=7),
        heartbeat_seconds=interval,
        orphan_timeout_seconds=orphan_timeout,
        on_orphaned=on_orphaned,
        on_replaced=on_replaced,
    )


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    agents.close()


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()


def test_heartbeats_are_sent_until_the_thread_is_stopped(ear: Ear) -> None:
    heartbeat = heartbeat_of(ear.voice)
    heartbeat.start()
    assert [ear.hear() for _ in range(3)] == [beat(step=7)] * 3
    (thread,) = [t for t in threading.enumerate() if t.name == "muster-heartbeat"]
    heartbeat.stop()
    thread.join(20)
    assert not thread.is_alive()
    ear.heard()
    assert ear.heard() == []


def test_reports_are_limited_in_rate(ear: Ear) -> None:
    heartbeat = heartbeat_of(ear.voice, interval=NEVER_SECONDS)
    for _ in range(100):
        heartbeat.report()
    assert 1 <= len(ear.heard()) < 50


def test_the_final_state_is_always_sent(ear: Ear) -> None:
    heartbeat = heartbeat_of(ear.voice, interval=NEVER_SECONDS)
    heartbeat.report()
    heartbeat.stop()
    assert ear.heard() == [beat(step=7), beat(step=7)]


def test_the_thread_reconnects_to_the_next_agent(agents: Agents) -> None:
    orphaned = threading.Event()
    agents.client.send(Hello())
    heartbeat = heartbeat_of(
        agents.client, orphan_timeout=PATIENCE_SECONDS, on_orphaned=orphaned.set
    )
    heartbeat.start()
    agents.dies()
    agents.starts()
    agents.accepts()
    assert agents.receives(2) == [Hello(), beat(step=7)]
    heartbeat.stop()
    assert not orphaned.is_set()


def test_without_a_new_agent_the_process_is_orphaned(agents: Agents) -> None:
    orphaned = threading.Event()
    heartbeat = heartbeat_of(agents.client, orphan_timeout=0.05, on_orphaned=orphaned.set)
    heartbeat.start()
    agents.dies()
    assert orphaned.wait(PATIENCE_SECONDS)
    heartbeat.stop()  # at once, without waiting for an agent


def test_the_final_state_waits_for_a_new_agent(agents: Agents) -> None:
    agents.dies()
    stopping = threading.Thread(target=heartbeat_of(agents.client).stop)
    stopping.start()
    agents.starts()
    agents.accepts()
    assert agents.receives(1) == [beat(step=7)]
    stopping.join(PATIENCE_SECONDS)
    assert not stopping.is_alive()


def test_a_process_replaced_after_its_last_step_notices_on_exit(agents: Agents) -> None:
    replaced = threading.Event()
    heartbeat = heartbeat_of(agents.client, interval=NEVER_SECONDS, on_replaced=replaced.set)
    agents.path.with_name("agent.0002.sock").touch()
    heartbeat.stop()
    assert replaced.is_set()


# Supervision


@pytest.fixture
def full_disk() -> Iterator[TextIO]:
    with Path("/dev/full").open("wb", buffering=0) as full:
        yield TextIOWrapper(full, write_through=True)


def supervision_of(ear: Ear, directory: Path) -> Supervision:
    return Supervision(ear.voice, settings_of(directory), lambda _stopping: beat())


def test_a_warning_goes_to_the_log_and_the_agent(
    ear: Ear, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    supervision_of(ear, tmp_path).warn("careful")
    assert ear.heard() == [Warned(message="careful")]
    assert capfd.readouterr().err == "muster: warning: careful\n"


def test_warnings_and_errors_reach_the_agent_with_a_full_log(
    ear: Ear, tmp_path: Path, full_disk: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", full_disk)
    supervision = supervision_of(ear, tmp_path)
    supervision.warn("careful")
    supervision._report_error(CheckpointDamaged, CheckpointDamaged("torn"), None)  # noqa: SLF001  as the interpreter calls it
    warned, refused = ear.heard()
    assert warned == Warned(message="careful")
    assert isinstance(refused, PermanentFailure)


SUPERVISED = """
import sys, time
from pathlib import Path
from tests.support.ranks import settings_of
from tests.support.stories import beat
from muster.runtime.agent_client import AgentClient, AgentSocket
from muster.runtime.heartbeat import Supervision
root, channel = Path(sys.argv[1]), int(sys.argv[2])
client = AgentClient(AgentSocket(channel, root / "agent.0001.sock"))
Supervision(client, settings_of(root), lambda stopping: beat()).start()
time.sleep(600)
"""


@pytest.mark.slow
def test_a_replaced_rank_exits_with_a_full_log(ear: Ear, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
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
        (CheckpointNotWritable("read only"), Reason.INVALID_CHECKPOINT),
        (UnsupportedState("holds a lambda"), Reason.INVALID_PROGRAM),
        (CheckpointFailed("the disk is full"), None),
        (StaleGeneration("/checkpoints", 1, 2), None),
        (MusterError("anything else"), None),
    ],
)
def test_only_permanent_errors_are_reported(error: MusterError, reason: Reason | None) -> None:
    expected = None if reason is None else PermanentFailure(reason=reason, message=str(error))
    assert permanent_error(error, Redaction()) == expected


def test_a_long_error_is_cut_to_fit_into_the_channel() -> None:
    refused = permanent_error(DatasetEmpty(HERE, "\N{SNOWMAN}" * 100_000), Redaction())
    assert refused is not None
    assert len(encode(refused)) < 1 << 16


def test_an_error_is_redacted_before_it_is_cut() -> None:
    value = "correct horse battery staple"
    whole = str(DatasetEmpty(HERE, ""))
    error = DatasetEmpty(HERE, "x" * (MESSAGE_LIMIT - len(whole) - 15) + value)
    refused = permanent_error(error, Redaction([value]))
    assert refused is not None
    assert "correct" in str(error)[:MESSAGE_LIMIT], "the cut is within the secret"
    assert "correct" not in refused.message
