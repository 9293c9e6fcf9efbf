"""What is seen of a job's agent, of real processes."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from unit.api.jobs import JOB

from api.agent_state import agent_state
from muster.contracts.job import TERMINAL, JobStatus
from muster.contracts.process import ProcessRecord
from muster.processes import identify, stands_still


@pytest.fixture
def agent() -> Iterator[ProcessRecord]:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        record = identify(process.pid)
        assert record is not None
        yield record
        process.kill()


def test_an_agent_that_stands_still_is_told_from_one_that_runs_and_one_that_is_gone(
    agent: ProcessRecord,
) -> None:
    assert agent_state(replace(JOB, agent=agent)) == "running"
    os.kill(agent.pid, signal.SIGSTOP)
    os.waitpid(agent.pid, os.WUNTRACED)
    assert stands_still(agent.pid)
    assert agent_state(replace(JOB, agent=agent)) == "stopped"
    gone = replace(agent, start_ticks=agent.start_ticks - 1)
    assert agent_state(replace(JOB, agent=gone)) == "gone"
    elsewhere = replace(agent, boot_id="another", node="another machine")
    assert agent_state(replace(JOB, agent=elsewhere)) == "elsewhere"


def test_a_job_without_an_agent_has_none() -> None:
    assert agent_state(JOB) is None


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_a_job_that_is_over_needs_no_agent(agent: ProcessRecord, status: JobStatus) -> None:
    assert agent_state(replace(JOB, agent=agent, status=status)) is None
