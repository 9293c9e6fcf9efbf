"""Agents on another host, through a command that runs our words there, such as ssh."""

import asyncio
import os
import secrets
import shlex
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from coordinator.launchers.launcher import AgentProcess, AgentValues, NotStarted
from muster.cluster.description import ClusterNode
from muster.contracts.attach import (
    REPEAT_SECONDS,
    AgentEnded,
    AgentRuns,
    Answer,
    CleanHost,
    HostClean,
    HostProbed,
    HostReady,
    LaunchAgent,
    Order,
    OrderFailed,
    ProbeFile,
    ProbeHost,
    WatchAgent,
)
from muster.contracts.errors import printable
from muster.contracts.interpreter import VERSION
from muster.contracts.messages import AgentAssignment
from muster.contracts.paths import JobFiles
from muster.contracts.rank import ProcessRecord
from muster.host.files import remove_probe_file, write_probe_file
from muster.host.processes import module_command

READY_SECONDS: Final = 15.0
"""How long a host may take to connect, to start Python and to say that it is ready."""

SILENCE_SECONDS: Final = 3 * REPEAT_SECONDS
"""A line on which nothing comes for longer is broken."""

KILL_SECONDS: Final = 10.0  # after which a kill is given up; who wants it asks again

FIRST_PAUSE_SECONDS: Final = 1.0
LAST_PAUSE_SECONDS: Final = 4.0  # between attempts; it doubles in between

DISK_SECONDS: Final = 10.0  # for a probe file

_DISK: Final = ThreadPoolExecutor(1, "probe-file")
"""A thread of its own: a network disk that hangs must hold up no commit. It removes a file after it
was written, also if the writing was given up."""

CONNECTING_LIMIT: Final = 8  # at once, to one host: sshd turns away more than ten

LINE_LIMIT_BYTES: Final = 1 << 16  # of an answer, and of what a login shell prints before it

_LOG: Final = structlog.get_logger("coordinator")
_DECODER: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)


SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
"""Never asks for a password. A dead connection ends after about 6 s of silence."""


def ssh_command(node: ClusterNode) -> list[str]:
    """Return the words that run a command on a node over SSH."""
    alive = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3")
    user = () if node.user is None else ("-l", node.user)
    return [*SSH, *alive, *user, "--", node.host]


class _Line:
    """A client process, and the way through it to `worker.attach` on the host."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the client. Raises OSError."""
        self._received = b""
        self._ignored_bytes = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the line
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)  # noqa: FBT003  the standard library's signature
        with theirs:
            try:
                self._client = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._errors,
                    env=environ,
                    start_new_session=True,  # Ctrl-C is for the coordinator
                )
            except OSError:
                self._errors.close()
                self._socket.close()
                raise

    async def give(self, order: Order) -> None:
        """Send the order. Raises OSError if the line is broken."""
        content = msgspec.json.encode(order) + b"\n"
        await asyncio.get_running_loop().sock_sendall(self._socket, content)

    async def answer(self) -> Answer | None:
        """Return the next answer; None if the line is broken, or silent for too long."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(SILENCE_SECONDS):
                while True:
                    line, end, rest = self._received.partition(b"\n")
                    if end:
                        self._received = rest
                        with suppress(msgspec.DecodeError):  # a login shell may print something
                            return _DECODER.decode(line)
                        self._ignored_bytes += len(line) + 1
                    elif not await self._receive():
                        return None
                    if self._ignored_bytes > LINE_LIMIT_BYTES:
                        return None
        return None

    async def _receive(self) -> bool:
        await asyncio.sleep(0)  # what follows does not let others run while there is data
        data = await asyncio.get_running_loop().sock_recv(self._socket, LINE_LIMIT_BYTES)
        self._received += data
        return bool(data) and len(self._received) < 2 * LINE_LIMIT_BYTES

    async def problem(self) -> str:
        """Wait until the host is ready; return why it takes no order, "" if it does."""
        answer = await self.answer()
        if self._ignored_bytes > LINE_LIMIT_BYTES:
            return "its login shell prints too much: let it print nothing if it is not interactive"
        if not isinstance(answer, HostReady):
            return self.last_error()
        if answer.version != VERSION:
            return f"it has Muster {answer.version}: install {VERSION} there, as here"
        return ""

    def last_error(self) -> str:
        """Return the last line that the client wrote to its standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        end = os.pread(self._errors.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
        return printable(next(iter(end.strip().splitlines()[-1:]), "it wrote no error"))

    def close(self) -> None:
        """End the client; what it has started on the host runs on."""
        self._socket.close()
        if self._client.returncode is None:  # not reaped, so the number is still its own
            # The whole group: a shell would leave its command behind.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._client.pid, signal.SIGKILL)
            self._client.wait()
        self._errors.close()


class CommandLauncher:
    """Agents on a host where our checkout and interpreter have the same paths as here."""

    def __init__(
        self, host: str, command: Sequence[str] | None, environ: Mapping[str, str]
    ) -> None:
        """`command` runs the words that follow it on the host: ``["ssh", "user@host", "--"]``.

        None: no way leads there. `environ` is the service's own environment, which the command gets
        without secrets.
        """
        self._host = host
        self._command = command and [*command, *module_command("worker.attach")]
        self._values = AgentValues(environ)
        self._connecting = asyncio.Semaphore(CONNECTING_LIMIT)
        self._watching: set[asyncio.Task[int | None]] = set()
        self._problem = ""  # the last one that was logged

    async def start(self, assignment: AgentAssignment) -> AgentProcess:
        secrets_dir = Path(assignment.secrets_dir)
        complete = await asyncio.to_thread(self._values.complete, assignment, secrets_dir)
        home = None
        with suppress(OSError):
            owner = JobFiles(Path(assignment.job_root)).owner.stat()
            home = owner.st_ino, owner.st_mtime_ns
        with ExitStack() as opened:
            async with probe_file(assignment.shared_dir) as probe:
                order = LaunchAgent(
                    assignment=complete,
                    environment={**assignment.environment, **self._values.given},
                    home=home,
                    probe=probe,
                )
                line = await self._give(order)
                opened.enter_context(closing(line))
                answer = await line.answer()
            if isinstance(answer, OrderFailed):
                raise NotStarted(f"{self._host} cannot start it: {printable(answer.message)}")
            opened.pop_all()
        # Without an answer it may run nevertheless: only the host can tell.
        record = answer.process if isinstance(answer, AgentRuns) else None
        return self._watched(WatchAgent(job_uid=assignment.job_uid, process=record), line)

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:
        return self._watched(WatchAgent(job_uid=job_uid, process=record))

    async def kill(self, agent: AgentProcess) -> None:
        order = WatchAgent(job_uid=agent.job_uid, process=agent.record, kills=True)
        try:
            async with asyncio.timeout(KILL_SECONDS):
                with closing(await self._give(order)) as line:
                    answer = await line.answer()
            if isinstance(answer, OrderFailed):
                self._note(f"{self._host}: {answer.message}")
        except TimeoutError:
            self._note(f"{self._host} did not answer within {KILL_SECONDS:g} s")
        except NotStarted:
            pass  # noted

    async def sweep(self, job_uid: str, known: Sequence[ProcessRecord]) -> None:
        answer = await self._insist(CleanHost(job_uid=job_uid, known=tuple(known)))
        if isinstance(answer, HostClean) and answer.left:
            self._note(f"{answer.left} processes or cgroups survive SIGKILL on {self._host}")

    async def probe(self, directory: Path | None = None) -> HostProbed:
        """Return what the host says about itself, and whether it shares a directory with us.

        Raises `NotStarted`, and OSError if nothing can be written into the directory.
        """
        async with probe_file(directory) as probe:
            order = ProbeHost(environment=self._values.given, probe=probe)
            with closing(await self._give(order)) as line:
                answer = await line.answer()
                why = line.last_error()
        if isinstance(answer, HostProbed):
            return answer
        if isinstance(answer, OrderFailed):
            why = printable(answer.message)
        raise NotStarted(f"{self._host} did not answer what it has: {why}")

    def living(self, records: Collection[ProcessRecord]) -> frozenset[ProcessRecord]:
        return frozenset(records)  # that their agent has ended says nothing about them

    def close(self) -> None:
        """Watch no longer; agents run on."""
        for task in self._watching:
            task.cancel()

    def _watched(self, order: WatchAgent, line: _Line | None = None) -> AgentProcess:
        """Return an agent that is watched through a line on which the host answers already."""

        async def watch() -> int | None:
            answer = await self._insist(order, line)
            return answer.status if isinstance(answer, AgentEnded) else None

        ended = asyncio.get_running_loop().create_task(watch())
        self._watching.add(ended)
        ended.add_done_callback(self._watching.discard)
        if line is not None:  # which a task that is cancelled before it begins does not close
            ended.add_done_callback(lambda _: line.close())
        return AgentProcess(job_uid=order.job_uid, record=order.process, ended=ended)

    async def _insist(
        self, order: WatchAgent | CleanHost, line: _Line | None = None
    ) -> AgentEnded | HostClean:
        """Give an order again and again until it has its last answer."""
        pause_seconds = FIRST_PAUSE_SECONDS
        while True:
            with suppress(NotStarted), closing(line or await self._give(order)) as open_line:
                while answer := await open_line.answer():
                    match answer:
                        case AgentEnded() | HostClean():
                            return answer
                        case AgentRuns():
                            order = WatchAgent(job_uid=order.job_uid, process=answer.process)
                            pause_seconds, self._problem = FIRST_PAUSE_SECONDS, ""
                        case OrderFailed():
                            self._note(f"{self._host}: {answer.message}")
                        case HostReady() | HostProbed():
                            pass
            line = None
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LAST_PAUSE_SECONDS)

    async def _give(self, order: Order) -> _Line:
        """Return a line on which the order was given. Raises `NotStarted`, which is noted."""
        if self._command is None:
            message = f"{self._host} is not in the cluster any more: add it again, or stop its jobs"
            self._note(message)
            raise NotStarted(message)
        async with self._connecting:
            with ExitStack() as opened:
                try:
                    line = opened.enter_context(closing(_Line(self._command, self._values.environ)))
                    async with asyncio.timeout(READY_SECONDS):
                        why = await line.problem()
                        if not why:
                            await line.give(order)
                except (TimeoutError, OSError) as error:
                    why = str(error) or f"no answer within {READY_SECONDS:g} s"
                if why:
                    what = f"{self._host} cannot be used: `{shlex.join(self._command)}` failed"
                    self._note(f"{what}: {why}")
                    raise NotStarted(f"{what}: {why}")
                opened.pop_all()
        return line

    def _note(self, problem: str) -> None:
        """Log a problem that is new since an agent there was last heard of."""
        if problem != self._problem:
            _LOG.warning(problem, action="host_unreachable", host=self._host)
        self._problem = problem


@asynccontextmanager
async def probe_file(directory: Path | str | None) -> AsyncIterator[ProbeFile | None]:
    """Have a probe file lie in a directory meanwhile, if there is one. Raises OSError."""
    if directory is None:
        yield None
        return
    name, content = f".muster-probe-{secrets.token_hex(8)}", secrets.token_hex(16)
    probe = ProbeFile(directory=str(directory), name=name, content=content)
    try:
        async with asyncio.timeout(DISK_SECONDS):
            await asyncio.get_running_loop().run_in_executor(_DISK, write_probe_file, probe)
        yield probe
    finally:
        _DISK.submit(remove_probe_file, probe)


class CommandLaunchers(dict[str, CommandLauncher]):
    """The launchers of a cluster's other nodes by name."""

    def __init__(self, nodes: Iterable[ClusterNode], environ: Mapping[str, str]) -> None:
        super().__init__(
            (node.name, CommandLauncher(node.name, ssh_command(node), environ)) for node in nodes
        )
        self._environ = environ

    def __missing__(self, host: str) -> CommandLauncher:
        # A job was there when the cluster still had it: now it is one that does not answer.
        return self.setdefault(host, CommandLauncher(host, None, self._environ))
