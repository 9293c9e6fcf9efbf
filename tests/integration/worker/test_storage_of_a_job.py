"""The storage process under an agent: revived, spared at a takeover, ended, alone with a key."""

import os
import signal
from pathlib import Path

from muster.contracts.messages.agent import Dismiss, RankExited
from muster.contracts.settings.names import STORAGE_SOCKET
from muster.host.processes import environment_of, identify
from tests.support.agent_stage import Stage
from tests.support.installation import await_value
from tests.support.storage_processes import KEY, connected, listening_process
from tests.support.takeovers import FOREVER, started, taken_over

KEYS = {"S3_SECRET_KEY": KEY}


def await_other(stage: Stage, first: int) -> None:
    """Wait for another process; the first may listen for a moment after its first thread ended."""
    await_value(lambda: identify(first) is None, lambda: f"{first} stays")
    socket = stage.files.storage_socket
    await_value(lambda: listening_process(socket) != first, lambda: f"{first} still listens")


def test_dead_process_is_replaced(stage: Stage) -> None:
    stage.start_agent(store_keys=KEYS)
    agent = stage.meet()
    rank = started(stage, agent, FOREVER)
    environment = environment_of(rank.process.pid)
    assert environment[STORAGE_SOCKET] == str(stage.files.storage_socket)
    first = listening_process(stage.files.storage_socket)
    os.kill(first, signal.SIGKILL)
    await_other(stage, first)
    for process in stage.running():
        assert KEY not in environment_of(process.pid).values()
        assert KEY not in Path(f"/proc/{process.pid}/cmdline").read_text()
    agent.say(Dismiss())
    assert agent.receive_of(RankExited, 0).signal == signal.SIGKILL
    assert stage.exit_code() == 0
    assert stage.running() == []
    assert not stage.files.storage_socket.exists()
    assert KEY not in stage.files.storage_log.read_text()


def test_process_outlives_an_agent_until_it_is_unused(stage: Stage) -> None:
    stage.start_agent(store_keys=KEYS)
    rank = started(stage, stage.meet(), FOREVER)
    first = listening_process(stage.files.storage_socket)
    with connected(stage.files.storage_socket):
        agent = taken_over(stage, rank, store_keys=KEYS)
        assert listening_process(stage.files.storage_socket) == first
    await_other(stage, first)
    agent.say(Dismiss())
    assert stage.exit_code() == 0
    assert stage.running() == []
