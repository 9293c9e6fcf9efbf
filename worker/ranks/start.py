"""How a rank's process is started, with its secrets, and which start errors are permanent.

Exec works for every program. A fork of the prefork server is faster, for managed training. In both
cases the process leads its own session, writes to its log, has a channel to the agent, and is a
child of the agent.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from errno import E2BIG, EACCES, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOEXEC, ENOTDIR, EPERM
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from muster.contracts.job.secrets import (
    SECRET_VARIABLES,
    SHARED_VARIABLES,
    Reference,
    SecretUnavailable,
)
from muster.contracts.location import moved
from muster.contracts.messages.agent import StartRank
from muster.contracts.messages.assignment import FORKED_PID, AgentAssignment, ForkRequest
from muster.contracts.messages.rank import Executing
from muster.contracts.messages.wire import encode
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.environ import JOB_VARIABLES
from muster.contracts.settings.names import (
    AGENT_FD,
    PREFORK_FD,
    PROCESS_TAG,
    PROCESS_TAG_WIDTH,
    SINGLE_THREADED,
    SPARE,
)
from muster.host.code import digest_of
from muster.host.containment import contain_self, set_tag_limit, tagged_processes
from muster.host.limits import ShellLimits
from muster.host.processes import (
    ProcessorWait,
    environment_of,
    identify,
    is_running,
    kill,
    module_command,
)
from muster.host.programs import interpreter_problem, path_with, with_interpreter
from muster.program import InvalidProgram
from muster.runtime.redaction import Redaction, held_secrets
from muster.runtime.secrets import SecretStore

IMPORT_SECONDS: Final = 6.0
"""Timeout of the first fork, which waits for the imports; no rank runs yet that could suffer.
Longer by the time in which the server gets no processor."""

FORK_SECONDS: Final = 1.0
"""The same of later forks, which take milliseconds; the agent's loop waits meanwhile."""

_PERMANENT: Final = frozenset(
    {E2BIG, EACCES, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOEXEC, ENOTDIR, EPERM}
)
"""Errors of a working directory, a command or an environment. All others may be transient: the
host may lack processes, memory or disk space."""


def is_command_error(error: OSError) -> bool:
    """Return whether running the command again would meet the same error."""
    return error.errno in _PERMANENT


def is_permanent_start_error(error: OSError, working_dir: str) -> bool:
    """Return whether another start in this directory would meet the same error.

    Only an environment that is too large, or an error about the directory itself, is the job's
    fault. Every other file belongs to the installation and may come back.
    """
    if error.errno == E2BIG:
        return True
    is_directory = error.filename is not None and Path(error.filename) == Path(working_dir)
    return is_directory and error.errno in _PERMANENT


class OtherCode(Exception):
    """A script is not that of the job any more."""

    def __init__(self, files: dict[str, str]) -> None:
        super().__init__("its script was changed")
        self.files = files


def start_on_this_host(order: StartRank, own: AgentAssignment) -> StartRank:
    """Return an order with the paths of the job as they are here.

    Words of a command are paths if they begin like one of the coordinator's host. Checkpoints that
    are sent to that host keep its path.
    """
    if not own.moves:
        return order
    environment = dict(order.environment)
    paths = {"DATASET_DIR", JOB_VARIABLES["program"], "CHECKPOINT_DIR"} & environment.keys()
    for name in paths - ({"CHECKPOINT_DIR"} if own.sends_checkpoints else set()):
        environment[name] = moved(environment[name], own.moves)
    if words := environment.get(JOB_VARIABLES["command"]):
        command = [moved(word, own.moves) for word in msgspec.json.decode(words, type=list[str])]
        environment[JOB_VARIABLES["command"]] = msgspec.json.encode(command).decode()
    return msgspec.structs.replace(
        order,
        environment=environment,
        working_dir=moved(order.working_dir, own.moves),
        script=order.script and (moved(order.script[0], own.moves), order.script[1]),
    )


def changed_script(order: StartRank) -> dict[str, str]:
    """Return path and digest of the script if it is not that of the order; raises `OtherCode`.

    A missing script is no other one: the start names what is missing.
    """
    path, digest = order.script or ("", None)
    present = digest_of(path) if path else None
    if present in {None, digest}:
        return {}
    if order.is_code_bound:
        raise OtherCode({path: present})
    return {path: present}


class ExecStarter:
    """A command, or managed training in an interpreter of its own."""

    def __init__(self, limits: ShellLimits, python: str | None = None) -> None:
        """`python` is the interpreter of the ranks; None: ours."""
        self._limits = limits
        self._python = python
        self._is_checked = False

    def start(self, order: StartRank, log: int, channel: socket.socket, *gpus: int) -> int:
        """Start the process and return its pid; raises OSError and `InvalidProgram`.

        A command inherits the descriptors `gpus`, which claim its GPUs.
        """
        environment = {**os.environ, **order.environment, AGENT_FD: str(channel.fileno())}
        words = environment.get(JOB_VARIABLES["command"])

        def prepare() -> None:
            if words and SPARE in environment:
                set_tag_limit(environment[PROCESS_TAG], is_final=False)
            elif words:  # managed training contains itself
                contain_self(environment[PROCESS_TAG])
            self._limits.apply_to(0)  # last: a low limit would not let us open a file

        def run(command: Sequence[str]) -> int:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(order.working_dir),
                env=environment,
                pass_fds=(channel.fileno(), *gpus),
                umask=self._limits.umask,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509  no other thread runs
            )
            # The agent reaps it. Popen must not wait for a pid that may be reused by then.
            process.returncode = 0
            return process.pid

        if words:
            if path := path_with(self._python, environment.get("PATH")):
                environment["PATH"] = path
            command = msgspec.json.decode(words, type=list[str])
            command = with_interpreter(command, self._python, order.environment)
            environment[JOB_VARIABLES["command"]] = msgspec.json.encode(command).decode()
            channel.send(encode(Executing()))
            with suppress(OSError, subprocess.SubprocessError):
                return run(command)
            # The launcher meets the same error, and reports it where a program's own would be.
            return run(module_command("worker"))  # the rank's interpreter may have no muster
        self.refuse_interpreter(environment)
        return run(module_command("muster.training.rank", python=self._python))

    def refuse_interpreter(self, environment: Mapping[str, str]) -> None:
        """Raise `InvalidProgram` if the job's interpreter cannot run managed training."""
        if self._python is not None and not self._is_checked:
            problem = interpreter_problem(self._python, environment)
            if problem is not None:
                raise InvalidProgram(problem)
            self._is_checked = True

    def warm_up(self) -> None:
        """Prepare the first start; here there is nothing to prepare."""

    def close(self) -> None:
        """End what `warm_up` has started."""


class PreforkStarter(ExecStarter):
    """Forks of a prefork server, which imports while the agent connects to its coordinator."""

    def __init__(
        self, job_uid: str, limits: ShellLimits, python: str | None, on_wait: Callable[[], None]
    ) -> None:
        """`on_wait` is called each second while the server imports: the agent has to report."""
        super().__init__(limits, python)
        self._tag = f"{job_uid}/prefork"
        self._server: ProcessRecord | None = None
        self._channel: socket.socket | None = None
        self._doubtful_tags: list[str] = []
        """Of processes that a failed server may have left; killed before the next start."""
        self._answer_seconds = IMPORT_SECONDS
        self._on_wait = on_wait

    def warm_up(self) -> None:
        """Start the server, once; if it fails, exec takes over."""
        if self._server is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            server = subprocess.Popen(
                module_command("muster.training.prefork", python=self._python),
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **SINGLE_THREADED,
                    PROCESS_TAG: self._tag.ljust(PROCESS_TAG_WIDTH),
                    PREFORK_FD: str(theirs.fileno()),
                },
                pass_fds=(theirs.fileno(),),
                umask=self._limits.umask,
                start_new_session=True,
            )
        self._limits.apply_to(server.pid)
        server.returncode = 0  # as in `ExecStarter`
        self.use(server.pid, ours)

    def use(self, pid: int, channel: socket.socket) -> None:
        """Use this server, a child of this process."""
        self._server, self._channel = identify(pid, or_zombie=True), channel
        channel.settimeout(FORK_SECONDS)
        self._answer_seconds = IMPORT_SECONDS

    def start(self, order: StartRank, log: int, channel: socket.socket, *_: int) -> int:
        # Check the directory here: in a fork the error would look like a crash.
        os.stat(f"{order.working_dir}/.")  # noqa: PTH116  a Path would drop the dot
        self.refuse_interpreter(os.environ)
        self.warm_up()
        pid = self._fork(order, log, channel)
        if pid is not None:
            return pid
        while self._doubtful_tags:
            for record in tagged_processes(self._doubtful_tags[-1]):
                kill(record)
            self._doubtful_tags.pop()
        return super().start(order, log, channel)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            if self._server is not None:
                kill(self._server)

    def _fork(self, order: StartRank, log: int, channel: socket.socket) -> int | None:
        """Return the pid of a fork, or None after giving up the server."""
        if self._channel is None:
            return None
        request = ForkRequest(
            environment={**os.environ, **order.environment}, working_dir=order.working_dir
        )
        try:
            content = msgspec.msgpack.encode(request)
            socket.send_fds(self._channel, [content], [log, channel.fileno()])
            answer = self._receive(self._channel)
        except OSError:
            answer = b""
        if not answer:
            self.close()
            # It may have forked without having answered.
            self._doubtful_tags = [order.environment[PROCESS_TAG], self._tag]
            return None
        self._answer_seconds = FORK_SECONDS
        (pid,) = FORKED_PID.unpack(answer)
        return int(pid)

    def _receive(self, channel: socket.socket) -> bytes:
        """Return the server's answer; raises OSError if there is none in time."""
        deadline = time.monotonic() + self._answer_seconds
        wait = ProcessorWait(0 if self._server is None else self._server.pid)
        while True:
            with suppress(TimeoutError):
                return channel.recv(FORKED_PID.size)
            if time.monotonic() >= deadline + wait.seconds:
                raise TimeoutError
            self._on_wait()


Starter: TypeAlias = ExecStarter | PreforkStarter


class RankSecrets:
    """A job's secrets: read for each start, given to ranks only, and redacted in reports."""

    def __init__(self, assignment: AgentAssignment) -> None:
        parsed = {name: Reference.parse(text) for name, text in assignment.secrets.items()}
        self._references = {name: found for name, found in parsed.items() if found is not None}
        self._shared_env = assignment.shared_env
        self._store = SecretStore(Path(assignment.secrets_dir))
        self.redaction: Final = Redaction()
        """Every value that a rank may hold; values stay in it, as ranks may print them late."""
        if self._references and assignment.adopted:
            # Redact both the variables of these ranks and the current values: the variables of an
            # exited rank cannot be read, and the values may have changed since its start.
            for rank in assignment.adopted:
                environment = environment_of(rank.process.pid)
                if is_running(rank.process):
                    self.redaction.add(held_secrets(environment))
            for reference in self._references.values():
                with suppress(SecretUnavailable, OSError):
                    self._read(reference)

    def variables(self) -> dict[str, str]:
        """Return a rank's secret variables, and the one that lists their names.

        Raises `SecretUnavailable`, or OSError if one cannot be read at the moment.
        """
        if not self._references:
            return {}
        values = {name: self._read(reference) for name, reference in self._references.items()}
        return {**values, SECRET_VARIABLES: ",".join(values)}

    def _read(self, reference: Reference) -> str:
        if str(reference) in self._shared_env:  # of a file on the coordinator's host
            value = self._shared_env[str(reference)]
        elif reference.source == "file":
            value = self._store.read(reference.name)
        elif reference.name in self._shared_env:
            value = self._shared_env[reference.name]
        else:
            raise SecretUnavailable(
                reference,
                f"is not available to jobs: set the variable for the service, add its name to "
                f"{SHARED_VARIABLES}, and restart the service",
            )
        self.redaction.add([value])
        return value
