"""Agents on another host, through a command that runs our words there, such as ssh."""

import asyncio
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Final

import structlog
from msgspec.structs import replace

from coordinator.agents.log_receiver import CoordinatorLogs
from coordinator.launchers.launcher import AgentProcess, AgentValues, NotStarted
from coordinator.launchers.mesh import MeshConnection, MeshNodes
from coordinator.launchers.remote_shell import CommandShell, HostConnection, RemoteShell
from coordinator.launchers.ssh import SocketDirectory, SshMaster
from muster.cluster.description import ClusterNode
from muster.contracts.errors import printable
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.messages.attach import (
    AgentEnded,
    AgentRuns,
    CleanHost,
    FetchLogs,
    HostClean,
    HostProbed,
    LaunchAgent,
    LogFetched,
    LogsFetched,
    LogsKept,
    Order,
    OrderFailed,
    ProbeFile,
    ProbeHost,
    WatchAgent,
)
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.paths import DataDir, JobFiles
from muster.host.files import file_identity, remove_probe_file, write_probe_file
from muster.host.processes import module_command
from muster.runtime.stderr_messages import LastMessage

READY_SECONDS: Final = 15.0
"""How long a host may take to connect, to start Python and to say that it is ready."""

KILL_SECONDS: Final = 10.0  # after which a kill is given up; who wants it asks again

FIRST_PAUSE_SECONDS: Final = 1.0
LAST_PAUSE_SECONDS: Final = 4.0  # between attempts; it doubles in between

DISK_SECONDS: Final = 10.0  # for a probe file

_DISK: Final = ThreadPoolExecutor(1, "probe-file")
"""A thread of its own: a network disk that hangs must hold up no commit. It removes a file after it
was written, also if the writing was given up."""

CONNECTING_LIMIT: Final = 8  # at once, to one host: sshd turns away more than ten

_LOG: Final = structlog.get_logger("coordinator")


class CommandLauncher:
    """Agents on a host where our checkout and interpreter have the same paths as here."""

    def __init__(
        self,
        host: str,
        command: Sequence[str] | HostConnection | None,
        environ: Mapping[str, str],
        data_dir: str = "",
    ) -> None:
        """`command` runs the words that follow it on the host, or is the connection that does.

        None: no way leads there. `environ` is the service's own environment, which the command gets
        without secrets. `data_dir` has the same path on the host as here.
        """
        self._host = host
        self._master: HostConnection | None = None
        self._command: Sequence[str] | None = ()
        if command is None or isinstance(command, Sequence):
            self._command = command
        else:
            self._master = command
        self._data_dir = data_dir
        self._values = AgentValues(environ)
        self._connecting = asyncio.Semaphore(CONNECTING_LIMIT)
        self._watching: set[asyncio.Task[int | None]] = set()
        self._problem = LastMessage()

    async def start(self, assignment: AgentAssignment) -> AgentProcess:
        secrets_dir = Path(assignment.secrets_dir)
        complete = await asyncio.to_thread(self._values.complete, assignment, secrets_dir)
        with ExitStack() as opened:
            async with probe_file(assignment.checkpoint_dir) as probe:
                order = LaunchAgent(
                    assignment=complete,
                    environment={**assignment.environment, **self._values.given},
                    coordinator_file=file_identity(JobFiles(Path(assignment.job_root)).owner),
                    probe=probe,
                )
                shell = await self._give(order)
                opened.enter_context(closing(shell))
                answer = await shell.answer()
            if isinstance(answer, OrderFailed):
                raise NotStarted(f"{self._host} cannot start it: {printable(answer.message)}")
            opened.pop_all()
        # Without an answer it may run nevertheless: only the host can tell.
        record = answer.process if isinstance(answer, AgentRuns) else None
        watch = WatchAgent(job_uid=assignment.job_uid, process=record, data_dir=self._data_dir)
        return self._watched(watch, shell)

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:
        return self._watched(WatchAgent(job_uid=job_uid, process=record, data_dir=self._data_dir))

    async def kill(self, agent: AgentProcess) -> None:
        order = WatchAgent(job_uid=agent.job_uid, process=agent.record, kills=True)
        try:
            async with asyncio.timeout(KILL_SECONDS):
                with closing(await self._give(order)) as shell:
                    answer = await shell.answer()
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

    async def probe(self, shared: Path | None = None, deleted: Sequence[str] = ()) -> HostProbed:
        """Return what the host says about itself, and whether it shares a directory with us.

        It removes the directories of `deleted` jobs (uids) of which nothing runs. Raises
        `NotStarted`, and OSError if nothing can be written into the directory.
        """
        async with probe_file(shared) as probe:
            order = ProbeHost(environment=self._values.given, probe=probe, data_dir=self._data_dir)
            if self._master is not None:
                identity = file_identity(DataDir(Path(self._data_dir)).coordinator_address)
                order = replace(order, coordinator_file=identity, deleted=tuple(deleted))
            with closing(await self._give(order)) as shell:
                answer = await shell.answer()
                why = shell.last_error()
        if isinstance(answer, HostProbed) and answer.facts is not None:
            offset = round(answer.clock - time.time(), 1)
            return replace(answer, facts=replace(answer.facts, clock_offset_seconds=offset))
        if isinstance(answer, OrderFailed):
            why = printable(answer.message)
        raise NotStarted(f"{self._host} did not answer what it has: {why}")

    async def fetch_logs(self, uid: str, files: JobFiles) -> None:
        """Write into `files` what the host still has of an ended job's logs.

        Then the host removes the job's directory. Raises `NotStarted` and OSError.
        """
        received = CoordinatorLogs(files, self._host)
        sizes = tuple(await asyncio.to_thread(received.sizes, uid, None))
        own = file_identity(files.owner)
        order = FetchLogs(job_uid=uid, data_dir=self._data_dir, coordinator_file=own, sizes=sizes)
        with closing(await self._give(order)) as shell:
            while isinstance(answer := await shell.answer(), LogFetched):
                await asyncio.to_thread(received.keep, answer.part)
            if isinstance(answer, LogsFetched):
                await shell.give(LogsKept())
                answer = await shell.answer()
            if isinstance(answer, OrderFailed):
                raise OSError(answer.message)

    def living(self, records: Collection[ProcessRecord]) -> frozenset[ProcessRecord]:
        return frozenset(records)  # that their agent has ended says nothing about them

    def close(self) -> None:
        """Watch no longer; agents run on."""
        for task in self._watching:
            task.cancel()
        if self._master is not None:
            self._master.close()

    def _watched(self, order: WatchAgent, shell: RemoteShell | None = None) -> AgentProcess:
        """Return an agent that is watched through a shell in which the host answers already."""

        async def watch() -> int | None:
            answer = await self._insist(order, shell)
            return answer.status if isinstance(answer, AgentEnded) else None

        ended = asyncio.get_running_loop().create_task(watch())
        self._watching.add(ended)
        ended.add_done_callback(self._watching.discard)
        if shell is not None:  # which a task that is cancelled before it begins does not close
            ended.add_done_callback(lambda _: shell.close())
        return AgentProcess(job_uid=order.job_uid, record=order.process, ended=ended)

    async def _insist(
        self, order: WatchAgent | CleanHost, shell: RemoteShell | None = None
    ) -> AgentEnded | HostClean:
        """Give an order again and again until it has its last answer."""
        pause_seconds = FIRST_PAUSE_SECONDS
        while True:
            with suppress(NotStarted), closing(shell or await self._give(order)) as opened_shell:
                while answer := await opened_shell.answer():
                    match answer:
                        case AgentEnded() | HostClean():
                            return answer
                        case AgentRuns():
                            order = replace(order, process=answer.process)
                            pause_seconds, self._problem.text = FIRST_PAUSE_SECONDS, None
                        case OrderFailed():
                            self._note(f"{self._host}: {answer.message}")
                        case _:
                            pass
            shell = None
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LAST_PAUSE_SECONDS)

    async def _give(self, order: Order) -> RemoteShell:
        """Return a shell to which the order was given. Raises `NotStarted`, which is noted."""
        if self._command is None:
            message = f"{self._host} is not in the cluster any more: add it, or stop its jobs"
            self._note(message)
            raise NotStarted(message)
        async with self._connecting:
            with ExitStack() as opened:
                try:
                    async with asyncio.timeout(READY_SECONDS):
                        why = await self._master.open() if self._master is not None else ""
                        if not why:
                            shell = opened.enter_context(closing(self._start_client()))
                            if not (why := await shell.problem()):
                                await shell.give(self._addressed(order))
                except (TimeoutError, OSError) as error:
                    why = str(error) or f"no answer within {READY_SECONDS:g} s"
                if why:
                    words = shlex.join([*self._command, "true"])
                    by_hand = words if self._master is None else self._master.by_hand
                    message = f"{self._host} cannot be used: {why}; try `{by_hand}`"
                    self._note(message)
                    raise NotStarted(message)
                opened.pop_all()
        return shell

    def _addressed(self, order: Order) -> Order:
        """Return an order with where the host reaches us now."""
        address = None if self._master is None else self._master.address
        if address is not None and isinstance(order, LaunchAgent):
            return replace(order, assignment=replace(order.assignment, coordinator=address))
        return replace(order, coordinator=address) if isinstance(order, WatchAgent) else order

    def _start_client(self) -> RemoteShell:
        words = module_command("worker.attach")
        if self._master is not None:
            return self._master.shell(words)
        return CommandShell([*(self._command or ()), *words], self._values.environ)

    def _note(self, problem: str) -> None:
        """Log a problem that is new since an agent there last answered."""
        if self._problem.is_new(problem):
            _LOG.warning(problem, action="host_unreachable", host=self._host)


@asynccontextmanager
async def probe_file(directory: Path | str | None) -> AsyncIterator[ProbeFile | None]:
    """Have a probe file lie in a directory meanwhile, if there is one.

    If it cannot be written, which is logged, no host can read it.
    """
    if directory is None:
        yield None
        return
    name, content = f".muster-probe-{secrets.token_hex(8)}", secrets.token_hex(16)
    probe = ProbeFile(directory=str(directory), name=name, content=content)
    try:
        try:
            async with asyncio.timeout(DISK_SECONDS):
                await asyncio.get_running_loop().run_in_executor(_DISK, write_probe_file, probe)
        except OSError as error:
            words = f"cannot tell which hosts share {directory}: {str(error) or 'the disk hangs'}"
            _LOG.warning(words, action="not_probed")
        yield probe
    finally:
        _DISK.submit(remove_probe_file, probe)


class CommandLaunchers(dict[str, CommandLauncher]):
    """The launchers of the cluster's other nodes by name."""

    def __init__(
        self,
        nodes: Iterable[ClusterNode],
        environ: Mapping[str, str],
        data: DataDir,
        forward_to: CoordinatorAddress | None = None,
        mesh: MeshNodes | None = None,
    ) -> None:
        """`forward_to` is where agents reach us; SSH forwards one on the loopback interface.

        With `mesh` they are nodes of a household, which know it by another host.
        """
        super().__init__()
        self._environ = environ
        self._sockets = SocketDirectory(data.ssh_sockets)
        given = AgentValues(environ).environ
        for node in nodes:
            way: HostConnection
            if mesh is not None and forward_to is not None:
                way = MeshConnection(node.name, mesh, forward_to)
            else:
                way = SshMaster(node, given, self._sockets, forward_to)
            self[node.name] = CommandLauncher(node.name, way, environ, str(data.root))

    def __missing__(self, host: str) -> CommandLauncher:
        # A job was there when the cluster file still had it: now it is one that does not answer.
        return self.setdefault(host, CommandLauncher(host, None, self._environ))

    def close(self) -> None:
        """End all connections; agents run on."""
        for launcher in self.values():
            launcher.close()
        self._sockets.close()
