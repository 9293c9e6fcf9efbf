"""Agents as processes of the coordinator's own machine, forked from a warm process."""

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import msgspec
import structlog

from coordinator.launchers.launcher import AgentProcess, AgentValues
from muster.contracts.messages.assignment import FORKED_PID, AgentAssignment, ForkAgent
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import PROCESS_TAG, PROCESS_TAG_WIDTH
from muster.contracts.settings.paths import JobFiles
from muster.host.containment import kill_job, tagged_processes
from muster.host.limits import ShellLimits
from muster.host.processes import (
    identify,
    is_running,
    kill,
    module_command,
    process_tree,
    shares_network,
)
from muster.runtime.agent_process import agent_tag, start_agent

ANSWER_SECONDS: Final = 6.0
"""Timeout of a fork server: the first answer waits for its imports, others take milliseconds."""

_LOG: Final = structlog.get_logger("coordinator")


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
        self._values = AgentValues(environ)
        self._server: ForkServer | None = None

    def start_fork_server(self) -> None:
        """Fork agents from now on, which pays off from the second one on. Raises OSError."""
        self._server = ForkServer(self._values.environ, self._limits)

    async def start(self, assignment: AgentAssignment) -> AgentProcess:
        """Start an agent. Raises OSError if no process can be started."""
        log = JobFiles(Path(assignment.job_root)).agent_log
        log.parent.mkdir(parents=True, exist_ok=True)
        complete = self._values.complete(assignment)
        with log.open("ab") as output:
            forked = None
            if not complete.environment:  # a fork has loaded numpy already
                forked = await self._fork(complete, output.fileno())
            return self._exec(complete, output) if forked is None else forked

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:
        """Return it, see `Launcher`. One that cannot reach us is ended, with its ranks.

        Those that we start could not reach them either.
        """
        found = record if record is not None and is_running(record) else None
        if found is None:
            found = next(iter(await asyncio.to_thread(tagged_processes, agent_tag(job_uid))), None)
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
        return AgentProcess(job_uid=job_uid, record=found, ended=_watch(pidfd, lambda: None))

    async def kill(self, agent: AgentProcess) -> None:
        if agent.record is not None:
            kill(agent.record)

    async def sweep(self, job_uid: str, known: Sequence[ProcessRecord]) -> None:
        if left := await asyncio.to_thread(kill_job, job_uid, known):
            message = f"{left} processes or cgroups survive SIGKILL"
            _LOG.error(message, action="sweep_failed", tag=f"{job_uid}/")

    def living(self, records: Collection[ProcessRecord]) -> frozenset[ProcessRecord]:
        return frozenset(record for record in records if is_running(record))

    def close(self) -> None:
        """End the fork server; agents run on."""
        if self._server is not None:
            self._server.close()

    async def _fork(self, assignment: AgentAssignment, log: int) -> AgentProcess | None:
        """Return a fork of the fork server; None without one, and where it fails."""
        if (server := self._server) is None:
            return None
        has_prefork = assignment.is_managed and assignment.python is None
        request = ForkAgent(job_uid=assignment.job_uid, has_prefork=has_prefork)
        reading, writing = os.pipe()
        with suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:  # as in `start_agent`
            with os.fdopen(reading, "rb"):
                pid = await server.ask(msgspec.msgpack.encode(request), reading, log)
            if pid is not None:
                pipe.write(msgspec.json.encode(assignment))
        if pid is None:  # an agent that it has forked nevertheless reads nothing, and ends
            if self._server is server:
                self.start_fork_server()
            return None
        ended = _watch(os.pidfd_open(pid), lambda: None)

        async def reap() -> int | None:
            await ended
            return await server.ask(FORKED_PID.pack(pid))

        return AgentProcess(
            job_uid=assignment.job_uid,
            record=identify(pid),
            ended=asyncio.ensure_future(reap()),
        )

    def _exec(self, assignment: AgentAssignment, log: IO[bytes]) -> AgentProcess:
        environ = {**assignment.environment, **self._values.environ}
        process = start_agent(assignment, log, environ, self._limits)
        pidfd = os.pidfd_open(process.pid)
        return AgentProcess(
            job_uid=assignment.job_uid,
            record=identify(process.pid),
            ended=_watch(pidfd, process.wait),
        )


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
