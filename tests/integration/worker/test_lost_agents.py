"""Ranks whose agent does not come back, and agents and ranks that have been replaced meanwhile."""

import os
import signal
import subprocess
import sys

import pytest

from muster.contracts.job.retry import REPLACED_CODE
from muster.contracts.messages.agent import RankExited
from muster.contracts.messages.rank import Heartbeat, Hello, Orphaned
from muster.contracts.settings.environ import process_tag
from muster.contracts.settings.names import PROCESS_TAG
from muster.host.containment import tag_of
from muster.host.processes import is_running, send_signal
from tests.support.agent_stage import AGENT_NUMBER, Stage
from tests.support.installation import await_value
from tests.support.takeovers import (
    FOREVER,
    LONG,
    receive_said,
    receive_training,
    started,
    taken_over,
)


def test_a_rank_that_stopped_itself_tells_a_late_agent(
    stage: Stage,
) -> None:
    stage.start_agent(orphan_timeout_seconds=0.3)
    first = stage.meet()
    program = (
        "import muster, time; run = muster.join()\n"
        "while not run.should_stop: time.sleep(0.01)\n"
        "print('asked', flush=True); time.sleep(600)"
    )
    rank = started(stage, first, [sys.executable, "-c", program], heartbeat_timeout=1.0)
    receive_said(first, 0, Hello, lambda _: True)
    stage.kill_agent()
    stage.await_log("asked")
    second = taken_over(stage, rank)
    receive_said(second, 0, Orphaned, lambda word: word.by == "itself (no agent for 0.3 s)")
    receive_said(second, 0, Heartbeat, lambda beat: beat.stopping)


def test_a_rank_without_an_agent_saves_and_exits(stage: Stage) -> None:
    stage.start_agent(is_managed=True, orphan_timeout_seconds=0.3)
    first = stage.meet()
    rank = started(stage, first, None, **LONG)
    receive_training(first)
    stage.kill_agent()
    await_value(lambda: not is_running(rank.process), lambda: "it does not exit")
    assert "is asked to stop" in stage.files.log(0, 0).read_text()


def test_an_exiting_rank_waits_for_the_next_agent(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    first = stage.meet()
    rank = started(stage, first, None, **LONG)
    receive_training(first)
    stage.kill_agent()
    send_signal(rank.process, signal.SIGTERM)
    stage.await_log("is asked to stop")
    second = taken_over(stage, rank, is_managed=True)
    receive_said(second, 0, Heartbeat, lambda beat: beat.stopping)
    assert second.receive_of(RankExited, 0).exit_code == 0


def test_a_replaced_rank_reports_it_and_exits(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    agent = stage.meet()
    started(stage, agent, None, **LONG)
    receive_training(agent)
    stage.signal_agent(signal.SIGSTOP)
    stage.files.agent_socket(AGENT_NUMBER + 1).touch()
    stage.await_log("has been replaced and exits")
    await_value(
        lambda: not any(tag_of(it.pid) for it in stage.running(0)), lambda: f"{stage.running(0)}"
    )


def test_an_agent_started_after_its_successor_touches_nothing(stage: Stage) -> None:
    """A suspended coordinator may start an agent late."""
    stage.files.agent_socket(AGENT_NUMBER + 1).parent.mkdir(parents=True, exist_ok=True)
    stage.files.agent_socket(AGENT_NUMBER + 1).touch()
    environment = {**os.environ, PROCESS_TAG: process_tag(stage.uid, 0, 0)}
    with subprocess.Popen(FOREVER, env=environment, start_new_session=True) as newer:
        await_value(lambda: stage.running(rank=0), lambda: "it does not run")
        stage.start_agent()
        assert stage.exit_code() == REPLACED_CODE
        assert newer.poll() is None
        newer.kill()


def test_a_replaced_agent_starts_no_rank(stage: Stage) -> None:
    stage.start_agent()
    agent = stage.meet()
    agent.receive()
    stage.files.agent_socket(AGENT_NUMBER + 1).touch()
    agent.say(stage.order(FOREVER))
    assert stage.exit_code() == REPLACED_CODE
    assert agent.receive() is None
    assert not stage.files.log(0, 0).exists()


def test_a_replaced_agent_names_the_newer_socket(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.start_agent()
    started(stage, stage.meet(), list(FOREVER))
    stage.files.agent_socket(AGENT_NUMBER + 1).touch()
    assert stage.exit_code() == REPLACED_CODE
    ends = "replaced by a newer agent (socket agent.0008.sock); its ranks here are killed"
    assert ends in capfd.readouterr().err
    record = stage.record(0, 0)
    by = "its agent, which was replaced by a newer agent (socket agent.0008.sock)"
    assert Orphaned(by=by) in [said.message for said in record.said]
    stage.start_agent()
    assert stage.exit_code() == REPLACED_CODE
    assert "(socket agent.0008.sock); no process was touched" in capfd.readouterr().err
    assert stage.files.agent_socket(AGENT_NUMBER + 1).exists()
