"""Starts and kills agents, and ends the processes they leave behind; one launcher per environment.

A launcher promises: an agent returned by `start` runs until its `ended` future is done, and after
`sweep` no process of that job is left where this launcher starts them.
"""

import asyncio
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from muster.contracts.environ import PROCESS_TAG, SERVICE_ONLY, STORE_KEYS
from muster.contracts.messages import AgentAssignment
from muster.contracts.paths import JobFiles
from muster.contracts.rank import ProcessRecord
from muster.contracts.secrets import Reference
from muster.contracts.settings import shared_variables
from muster.host.containment import cgroups_of_job, kill_cgroup, tagged_processes
from muster.host.limits import ShellLimits
from muster.host.processes import (
    PollLimit,
    identify,
    is_running,
    kill,
    module_command,
    process_tree,
)

SWEEP_PATIENCE: Final = PollLimit(seconds=2.0, pause_seconds=0.02)
"""A process that survives SIGKILL for longer hangs in the kernel; agents wait as long."""

_LOG: Final = structlog.get_logger("coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProcess:
    """A started agent."""

    record: ProcessRecord | None  # none if it ended before it could be identified
    ended: "asyncio.Future[int | None]"
    """Its exit status once it has ended; None if it is not our child."""


class Launcher(Protocol):
    """Where agents run."""

    async def start(self, assignment: AgentAssignment) -> AgentProcess: ...

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:
        """Return a job's agent that another coordinator has started, if it lives.

        `record` identifies it; None if that was not recorded.
        """

    async def kill(self, agent: AgentProcess) -> None: ...

    async def sweep(self, job_uid: str, known: Sequence[ProcessRecord]) -> None:
        """End every process of a job, and the `known` ones, which may have lost their tag."""


class LocalLauncher:
    """Agents as processes of this machine, each in its own session, so that they outlive us."""

    def __init__(self, environ: Mapping[str, str], limits: ShellLimits) -> None:
        """`environ` is the service's own environment; agents inherit it without shared secrets.

        `limits` are those that agents start with and give to their ranks.
        """
        self._limits = limits
        shared = shared_variables(environ)
        self._shared = {name: environ[name] for name in shared if environ.get(name)}
        self._store_keys = {name: environ[name] for name in STORE_KEYS if environ.get(name)}
        self._environ = {
            name: value for name, value in environ.items() if name not in SERVICE_ONLY | shared
        }

    async def start(self, assignment: AgentAssignment) -> AgentProcess:
        """Start an agent. Raises OSError if no process can be started."""
        process = self._spawn(assignment)
        pidfd = os.pidfd_open(process.pid)
        return AgentProcess(record=identify(process.pid), ended=_watch(pidfd, process.wait))

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:
        found = record if record is not None and is_running(record) else None
        if found is None:
            found = next(iter(await asyncio.to_thread(tagged_processes, _tag(job_uid))), None)
        if found is None:
            return None
        try:
            pidfd = os.pidfd_open(found.pid)
        except ProcessLookupError:
            return None
        if not is_running(found):  # the pid was reused before the descriptor was open
            os.close(pidfd)
            return None
        return AgentProcess(record=found, ended=_watch(pidfd, lambda: None))

    async def kill(self, agent: AgentProcess) -> None:
        if agent.record is not None:
            kill(agent.record)

    async def sweep(self, job_uid: str, known: Sequence[ProcessRecord]) -> None:
        await asyncio.to_thread(_end_processes, job_uid, known)

    def _spawn(self, assignment: AgentAssignment) -> subprocess.Popen[bytes]:
        log = JobFiles(Path(assignment.job_root)).agent_log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                module_command("worker.agent"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**self._environ, PROCESS_TAG: _tag(assignment.job_uid)},
                umask=self._limits.umask,
                start_new_session=True,
            )
        self._limits.apply_to(process.pid)  # before the assignment, after which it reads its limits
        references = map(Reference.parse, assignment.secrets.values())
        shared = {
            reference.name: self._shared[reference.name]
            for reference in references
            if reference is not None
            and reference.source == "env"
            and reference.name in self._shared
        }
        keys = None if assignment.store_keys is None else self._store_keys
        complete = msgspec.structs.replace(assignment, shared_env=shared, store_keys=keys)
        content = msgspec.json.encode(complete)
        assert process.stdin is not None  # noqa: S101  it is a pipe
        # An agent that dies at once breaks the pipe; its pidfd reports that.
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(content)
        return process


def _tag(job_uid: str) -> str:
    return f"{job_uid}/agent"


def _watch(pidfd: int, reap: Callable[[], int | None]) -> "asyncio.Future[int | None]":
    """Return a future of what `reap` returns once the process has ended; no thread waits."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int | None] = loop.create_future()

    def on_end() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        ended.set_result(reap())

    loop.add_reader(pidfd, on_end)
    return ended


def _end_processes(job_uid: str, known: Sequence[ProcessRecord]) -> None:
    """Kill tagged and known processes and their descendants until none is left."""
    prefix = f"{job_uid}/"
    members = list(known)

    def kill_all() -> int:
        # Find all of them first: killing a parent hides its descendants.
        found = process_tree([*tagged_processes(prefix), *members])
        members[:] = [record for record in found if kill(record)]
        return len(members) + sum(not kill_cgroup(cell) for cell in cgroups_of_job(job_uid))

    if left := SWEEP_PATIENCE.poll(kill_all):
        message = f"{left} processes or cgroups survive SIGKILL"
        _LOG.error(message, action="sweep_failed", tag=prefix)
