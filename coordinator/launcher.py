"""Starts agents, ends them, and ends what they leave behind. One launcher per kind of place.

A launcher promises: what `start` returned runs until its `ended` future is done, and after `sweep`
no process of that job is left where this launcher starts them.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from muster.cells import cells_of_job, clear_cell
from muster.contracts.agent import AgentAssignment
from muster.contracts.environ import MARK, NOT_FOR_RANKS, names_lent
from muster.contracts.layout import JobFiles
from muster.contracts.process import ProcessRecord
from muster.contracts.secrets import Reference
from muster.descriptors import DescriptorLimits
from muster.patience import Patience
from muster.processes import family, identify, is_running, kill, marked

SWEEP_PATIENCE: Final = Patience(seconds=2.0, pause_seconds=0.02)
"""As agents' own sweeps have: a process that survives SIGKILL so long hangs in the kernel."""

_LOG: Final = structlog.get_logger("coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProcess:
    """A started agent."""

    record: ProcessRecord | None
    """None if it was over before it could be looked at."""
    ended: "asyncio.Future[int | None]"
    """Its exit status, once it has ended; None if that went to somebody else."""


class Launcher(Protocol):
    """Where agents run."""

    async def start(self, assignment: AgentAssignment) -> AgentProcess: ...

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:
        """Return the agent of a job if it runs; somebody else has started it.

        `record` is what is known of it, None if nobody has written that down.
        """

    async def kill(self, agent: AgentProcess) -> None: ...

    async def sweep(self, job_uid: str, known: Sequence[ProcessRecord]) -> None:
        """End every process of a job.

        `known` are processes of it that may have lost their mark.
        """


class LocalLauncher:
    """Agents as processes of this machine, each in a session of its own: they outlive us."""

    def __init__(self, environ: Mapping[str, str], limits: DescriptorLimits) -> None:
        """`environ` is the service's own; what it lends nobody inherits.

        `limits` are what agents begin with, and ranks are given.
        """
        self._limits = limits
        lent = names_lent(environ)
        self._lent = {name: environ[name] for name in lent if environ.get(name)}
        self._environ = {
            name: value for name, value in environ.items() if name not in NOT_FOR_RANKS | lent
        }

    async def start(self, assignment: AgentAssignment) -> AgentProcess:
        """Start an agent; raises OSError if there is no process to be had."""
        process = self._spawn(assignment)
        pidfd = os.pidfd_open(process.pid)
        return AgentProcess(record=identify(process.pid), ended=_watch(pidfd, process.wait))

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:
        found = record if record is not None and is_running(record) else None
        if found is None:
            found = next(iter(await asyncio.to_thread(marked, _mark(job_uid))), None)
        if found is None:
            return None
        try:
            pidfd = os.pidfd_open(found.pid)
        except ProcessLookupError:
            return None
        if not is_running(found):  # only now is it certain whom the descriptor holds
            os.close(pidfd)
            return None
        return AgentProcess(record=found, ended=_watch(pidfd, lambda: None))

    async def kill(self, agent: AgentProcess) -> None:
        if agent.record is not None:
            kill(agent.record)

    async def sweep(self, job_uid: str, known: Sequence[ProcessRecord]) -> None:
        await asyncio.to_thread(_end_family, job_uid, known)

    def _spawn(self, assignment: AgentAssignment) -> subprocess.Popen[bytes]:
        log = JobFiles(Path(assignment.job_root)).agent_log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "worker.agent"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**self._environ, MARK: _mark(assignment.job_uid)},
                start_new_session=True,
            )
        self._limits.impose(process.pid)  # it looks once it has its assignment
        lent = {
            reference.name: self._lent[reference.name]
            for reference in map(Reference.parse, assignment.secrets.values())
            if reference is not None and reference.source == "env" and reference.name in self._lent
        }
        _tell(process, msgspec.json.encode(msgspec.structs.replace(assignment, lent=lent)))
        return process


def _tell(process: subprocess.Popen[bytes], assignment: bytes) -> None:
    if process.stdin is None:
        raise ValueError("the agent was started without a standard input")
    # An agent that dies at once breaks the pipe; its end is seen by its pidfd.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(assignment)


def _mark(job_uid: str) -> str:
    return f"{job_uid}/agent"


def _watch(pidfd: int, reap: Callable[[], int | None]) -> "asyncio.Future[int | None]":
    """Return a future of what `reap` returns, woken by the process's pidfd and by no thread."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int | None] = loop.create_future()

    def on_end() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        ended.set_result(reap())

    loop.add_reader(pidfd, on_end)
    return ended


def _end_family(job_uid: str, known: Sequence[ProcessRecord]) -> None:
    """Kill what has the job's mark or is known, and its family, until nothing of that is left."""
    prefix = f"{job_uid}/"
    members = list(known)

    def end_each() -> int:
        # All of them are found before one is killed: a family is told by who is whose parent.
        found = family([*marked(prefix), *members])
        members[:] = [record for record in found if kill(record)]
        return len(members) + sum(not clear_cell(cell) for cell in cells_of_job(job_uid))

    left = SWEEP_PATIENCE.outlast(end_each)
    if left:
        words = f"{left} processes or cells survive SIGKILL"
        _LOG.error(words, action="sweep_failed", mark=prefix)
