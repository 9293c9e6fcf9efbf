"""Ranks whose agent does not come back save and exit."""

import signal
import sys

from muster.contracts.messages import Heartbeat, Hello, Orphaned, RankExited
from muster.host.processes import is_running, send_signal
from tests.support.agent_stage import Stage
from tests.support.installation import await_value
from tests.support.takeovers import LONG, hear_said, started, taken_over


def test_a_rank_that_stopped_itself_tells_a_late_agent(
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
    stage.kill_agent()
    stage.await_log("asked")
    second = taken_over(stage, rank)
    hear_said(second, 0, Orphaned, lambda word: word.by == "itself (no agent for 1 s)")
    hear_said(second, 0, Heartbeat, lambda beat: beat.stopping)


def test_a_rank_without_an_agent_saves_and_exits(stage: Stage) -> None:
    stage.start_agent(is_managed=True, orphan_timeout_seconds=1.0)
    first = stage.meet()
    rank = started(stage, first, None, **LONG)
    hear_said(first, 0, Heartbeat, lambda beat: beat.progress.step > 0)
    stage.kill_agent()
    await_value(lambda: not is_running(rank.process), lambda: "it does not exit")
    assert "is asked to stop" in stage.files.log(0, 0).read_text()


def test_an_exiting_rank_waits_for_the_next_agent(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    first = stage.meet()
    rank = started(stage, first, None, **LONG)
    hear_said(first, 0, Heartbeat, lambda beat: beat.progress.step > 0)
    stage.kill_agent()
    send_signal(rank.process, signal.SIGTERM)
    stage.await_log("is asked to stop")
    second = taken_over(stage, rank, is_managed=True)
    hear_said(second, 0, Heartbeat, lambda beat: beat.stopping)
    assert second.hear_of(RankExited, 0).exit_code == 0
