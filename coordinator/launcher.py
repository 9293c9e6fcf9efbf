"""Starts and kills agents, and ends the processes they leave behind; one launcher per environment.

A launcher promises: an agent returned by `start` runs until its `ended` future is done, and after
`sweep` no process of that job is left where this launcher starts them.
"""

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

import msgspec
import structlog

from muster.contracts.environ import (
    PROCESS_TAG,
    PROCESS_TAG_WIDTH,
    SERVICE_ONLY,
    STORE_KEYS,
)
from muster.contracts.messages import FORKED_PID, AgentAssignment, ForkAgent
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
    shares_network,
)

SWEEP_PATIENCE: Final = PollLimit(seconds=2.0, pause_seconds=0.02)
"""A process that survives SIGKILL for longer hangs in the kernel; agents wait as long."""

ANSWER_SECONDS: Final = 6.0
"""Timeout of a fork server: the first answer waits for its imports, others take milliseconds."""

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

        `record` identifies it; None if that was not recorded. One that cannot reach us is ended,
        with its ranks: those that we start could not reach them either.
        """

    async def kill(self, agent: AgentProcess) -> None: ...

    async def sweep(self, job_uid: str, known: Sequence[ProcessRecord]) -> None:
        """End every process of a job, and the `known` ones, which may have lost their tag."""


class ForkServer:
    """A fork server process; see `worker.fork_server`."""

    def __init__(self, environ: Mapping[str, str], limits: ShellLimits) -> None:
        """Start it. `environ` and `limits` are those of the agents; raises OSError."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)  # noqa: FBT003  the standard library's signature
        with theirs:
            self._process = subprocess.Popen(
                module_command("worker.fork_server"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # Each fork overwrites the tag with its own.
                env={**environ, PROCESS_TAG: " " * PROCESS_TAG_WIDTH},
                umask=limits.umask,
                start_new_session=True,
            )
        limits.apply_to(self._process.pid)
        self._lock = asyncio.Lock()

    async def ask(self, request: bytes, *descriptors: int) -> int | None:
        """Return the pid of a new agent, or, without descriptors, the exit code of an ended one.

        None if the server has failed, which ends it.
        """
        async with self._lock:
            try:
                socket.send_fds(self._channel, [request], descriptors)
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await asyncio.get_running_loop().sock_recv(self._channel, 8)
                return int(FORKED_PID.unpack(answer)[0])
            except (OSError, struct.error):
                self.close()
                return None

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


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
        self._server: ForkServer | None = None

    def start_fork_server(self) -> None:
        """Fork agents from now on, which pays off from the second one on. Raises OSError."""
        self._server = ForkServer(self._environ, self._limits)

    async def start(self, assignment: AgentAssignment) -> AgentProcess:
        """Start an agent. Raises OSError if no process can be started."""
        log = JobFiles(Path(assignment.job_root)).agent_log
        log.parent.mkdir(parents=True, exist_ok=True)
        content = self._complete(assignment)
        with log.open("ab") as output:
            forked = await self._fork(assignment, content, output.fileno())
            return self._exec(assignment, content, output) if forked is None else forked

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:
        found = record if record is not None and is_running(record) else None
        if found is None:
            found = next(iter(await asyncio.to_thread(tagged_processes, _tag(job_uid))), None)
        if found is None:
            return None
        if not shares_network(found.pid):
            members = await asyncio.to_thread(process_tree, [found])
            kill(found)  # first: it would record how its ranks end
            await self.sweep(job_uid, members)
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

    def close(self) -> None:
        """End the fork server; agents run on."""
        if self._server is not None:
            self._server.close()

    async def _fork(
        self, assignment: AgentAssignment, content: bytes, log: int
    ) -> AgentProcess | None:
        """Return a fork of the fork server; None without one, and where it fails."""
        if (server := self._server) is None:
            return None
        has_prefork = assignment.is_managed and assignment.python is None
        request = ForkAgent(job_uid=assignment.job_uid, has_prefork=has_prefork)
        reading, writing = os.pipe()
        with suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:  # as in `_exec`
            with os.fdopen(reading, "rb"):
                pid = await server.ask(msgspec.msgpack.encode(request), reading, log)
            if pid is not None:
                pipe.write(content)
        if pid is None:  # an agent that it has forked nevertheless reads nothing, and ends
            if self._server is server:
                self.start_fork_server()
            return None
        ended = _watch(os.pidfd_open(pid), lambda: None)

        async def reap() -> int | None:
            await ended
            return await server.ask(FORKED_PID.pack(pid))

        return AgentProcess(record=identify(pid), ended=asyncio.ensure_future(reap()))

    def _exec(self, assignment: AgentAssignment, content: bytes, log: IO[bytes]) -> AgentProcess:
        process = subprocess.Popen(
            module_command("worker.agent"),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**self._environ, PROCESS_TAG: _tag(assignment.job_uid)},
            umask=self._limits.umask,
            start_new_session=True,
        )
        self._limits.apply_to(process.pid)  # before the assignment, after which it reads its limits
        assert process.stdin is not None  # noqa: S101  it is a pipe
        # An agent that dies at once breaks the pipe; its pidfd reports that.
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(content)
        pidfd = os.pidfd_open(process.pid)
        return AgentProcess(record=identify(process.pid), ended=_watch(pidfd, process.wait))

    def _complete(self, assignment: AgentAssignment) -> bytes:
        """Return the encoded assignment with the values that the job's agent alone may have."""
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
        return msgspec.json.encode(complete)


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
