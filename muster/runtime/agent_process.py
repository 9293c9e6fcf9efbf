"""Start the process of an agent: on the coordinator's host by itself, elsewhere by another."""

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from muster.contracts.job.status import JobUid
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.attach import LaunchAgent
from muster.contracts.settings.names import PROCESS_TAG, SERVICE_ONLY
from muster.contracts.settings.paths import JobFiles
from muster.host.addresses import publish_address
from muster.host.limits import ShellLimits
from muster.host.processes import module_command
from muster.runtime.archive import claim_directory


def agent_tag(job_uid: str) -> str:
    """Return the process tag of a job's agent."""
    return f"{job_uid}/agent"


def start_agent(
    assignment: AgentAssignment, log: IO[bytes], environ: Mapping[str, str], limits: ShellLimits
) -> subprocess.Popen[bytes]:
    """Start an agent in a session of its own, so that it outlives us. Raises OSError."""
    process = subprocess.Popen(  # noqa: S603  our own module
        module_command("worker.agent"),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**environ, PROCESS_TAG: agent_tag(assignment.job_uid)},
        umask=limits.umask,
        start_new_session=True,
    )
    limits.apply_to(process.pid)  # before the assignment, after which it reads its limits
    assert process.stdin is not None  # noqa: S101  it is a pipe
    # An agent that dies at once breaks the pipe; its pidfd reports that.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(msgspec.json.encode(assignment))
    return process


def launch_agent(order: LaunchAgent, limits: ShellLimits) -> subprocess.Popen[bytes]:
    """Start an agent on a host other than the coordinator's. Raises OSError."""
    assignment = order.assignment
    files = JobFiles(Path(assignment.job_root))
    claim_directory(files, JobUid(assignment.job_uid))
    files.run.mkdir(exist_ok=True)
    if assignment.coordinator is not None:
        publish_address(assignment.coordinator, Path(assignment.address_file))
    environ = {name: value for name, value in os.environ.items() if name not in SERVICE_ONLY}
    with files.agent_log.open("ab") as log:
        return start_agent(assignment, log, environ | order.environment, limits)
