"""What is seen of a job's agent, of real processes."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from api.liveness import agent_state
from muster.processes import identify, stands_still


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process
        process.kill()


def test_an_agent_that_stands_still_is_told_from_one_that_runs_and_one_that_is_gone(
    process: subprocess.Popen[bytes],
) -> None:
    agent = identify(process.pid)
    assert agent is not None
    assert agent_state(agent) == "running"
    os.kill(agent.pid, signal.SIGSTOP)
    os.waitpid(agent.pid, os.WUNTRACED)
    assert stands_still(agent.pid)
    assert agent_state(agent) == "stopped"
    assert agent_state(replace(agent, start_ticks=agent.start_ticks - 1)) == "gone"
    elsewhere = replace(agent, boot_id="another", node="another machine")
    assert agent_state(elsewhere) == "elsewhere"


def test_a_job_without_an_agent_has_none() -> None:
    assert agent_state(None) is None
