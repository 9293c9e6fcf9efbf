"""No agent comes back: ranks and commands are asked to exit, and it is known by whom."""

import os
import signal
import sys

import pytest
from agent_stage import Stage
from installation import await_value
from takeovers import FOREVER, LONG, hear_said, open_gate, started, taken_over

from muster.contracts.messages import (
    Beat,
    Dismiss,
    Executing,
    Hello,
    Orphaned,
    RankExited,
)
from muster.processes import descendants, is_running, marked, send_signal


def test_commands_that_no_agent_comes_back_for_are_asked_to_exit_and_then_ended(
    stage: Stage,
) -> None:
    stage.start_agent(orphan_timeout_seconds=0.2)
    agent = stage.meet()
    polite = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    stubborn = "trap '' TERM; setsid env -i sleep 604 & echo ready; while :; do sleep 0.05; done"
    for rank, script in enumerate((polite, stubborn)):
        started(stage, agent, ["sh", "-c", script], rank=rank)
        stage.await_log("ready", rank)
    stage.kill_agent()
    await_value(lambda: not stage.running(), lambda: f"{stage.running()} go on")
    assert "saved" in stage.files.log(0, 0).read_text()


def test_who_was_asked_by_the_warden_before_an_agent_came_after_all_is_said_to_be(
    stage: Stage,
) -> None:
    stage.start_agent(orphan_timeout_seconds=1.0, stop_grace_seconds=600.0)
    first = stage.meet()
    slow = "trap 'echo asked' TERM; echo ready; until [ -e gate ]; do sleep 0.02; done; exit 3"
    rank = started(stage, first, ["sh", "-c", slow])
    stage.await_log("ready")
    stage.kill_agent()
    stage.await_log("asked")
    second = taken_over(stage, rank, orphan_timeout_seconds=1.0)
    hear_said(second, 0, Orphaned, lambda word: word.by == "its warden (no agent for 1 s)")
    open_gate(stage)
    assert second.hear_of(RankExited, 0).exit_code == 3
    assert [said.message.by for said in stage.record(0, 0).said if said.message != Executing()]


def test_a_rank_that_asked_itself_to_stop_says_so_to_an_agent_that_comes_after_all(
    stage: Stage,
) -> None:
    stage.start_agent(orphan_timeout_seconds=1.0)
    first = stage.meet()
    program = (
        "import muster, time; run = muster.join()\n"
        "while not run.should_stop: time.sleep(0.01)\n"
        "print('asked', flush=True); time.sleep(600)"
    )
    rank = started(stage, first, [sys.executable, "-c", program], heartbeat_timeout=1.0)
    hear_said(first, 0, Hello, lambda _: True)
    (warden,) = marked(f"{stage.uid}/warden")
    send_signal(warden, signal.SIGKILL)
    stage.kill_agent()
    stage.await_log("asked")
    second = taken_over(stage, rank)
    hear_said(second, 0, Orphaned, lambda word: word.by == "itself (no agent for 1 s)")
    hear_said(second, 0, Beat, lambda beat: beat.stopping)


def test_the_next_agent_has_a_warden_of_its_own_and_ends_the_one_before(stage: Stage) -> None:
    stage.start_agent()
    first = stage.meet()
    rank = started(stage, first, list(FOREVER))
    (before,) = marked(f"{stage.uid}/warden")
    second = taken_over(stage, rank)
    assert not is_running(before)
    assert len(marked(f"{stage.uid}/warden")) == 1
    second.say(Dismiss())
    assert stage.exit_code() == 0
    assert not stage.running()


def test_a_warden_whose_sleep_is_ended_asks_nobody_to_exit_and_says_nothing(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever ends a warden may come to its sleep first."""
    stage.start_agent()
    rank = started(stage, stage.meet(), list(FOREVER))
    (warden,) = marked(f"{stage.uid}/warden")
    stage.kill_agent()
    await_value(lambda: descendants(warden.pid), lambda: "it does not wait")
    (sleep,) = descendants(warden.pid)
    os.kill(sleep, signal.SIGKILL)
    await_value(lambda: not is_running(warden), lambda: "it goes on")
    assert is_running(rank.process)
    assert capfd.readouterr().err == ""


def test_a_rank_that_no_agent_adopts_saves_and_exits(stage: Stage) -> None:
    stage.start_agent(is_managed=True, orphan_timeout_seconds=1.0)
    first = stage.meet()
    rank = started(stage, first, None, **LONG)
    hear_said(first, 0, Beat, lambda beat: beat.step > 0)
    stage.kill_agent()
    await_value(lambda: not is_running(rank.process), lambda: "it goes on for ever")
    assert "is asked to stop" in stage.files.log(0, 0).read_text()


def test_a_rank_that_ends_without_an_agent_waits_for_one_to_see_it(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    first = stage.meet()
    rank = started(stage, first, None, **LONG)
    hear_said(first, 0, Beat, lambda beat: beat.step > 0)
    stage.kill_agent()
    send_signal(rank.process, signal.SIGTERM)
    stage.await_log("is asked to stop")
    second = taken_over(stage, rank, is_managed=True)
    hear_said(second, 0, Beat, lambda beat: beat.stopping)
    assert second.hear_of(RankExited, 0).exit_code == 0
