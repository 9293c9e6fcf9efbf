"""One SSH connection a host: the master through which all orders go, and agents connect to us.

OpenSSH does the work (ControlMaster), with the user's configuration, keys and jump hosts. An order
takes a session of the master, which needs no handshake. Where the host allows no more of them, or
the master has just ended, ssh connects anew for it.

The master runs ``cat`` on the host, and its input is our socket: it ends when we do, however
that is.
"""

import asyncio
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final
from weakref import WeakSet

from coordinator.launchers.remote_shell import CommandShell, RemoteShell
from muster.cluster.description import ClusterNode
from muster.cluster.requests import SSH, login_words
from muster.contracts.agent import LOOPBACK
from muster.contracts.interpreter import VERSION
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.messages.attach import HostReady

LOGIN_SECONDS: Final = 12.0  # ssh itself limits only what comes before its handshake

_REASONS: Final = {
    "Could not resolve": "no address of {host} is known: correct its host: in the cluster file",
    # Some distributions have it print a command, which knows the file, alias and port.
    r"remove with:\s+(ssh-keygen .*\S)": "its host key has changed: if it should, `{0}`",
    r"Offending \w+ key in (.+):(\d+)": "its host key has changed: if it should, remove line {1} "
    "of {0}",
    "Host key verification failed": "its host key is not known: log in by hand and compare it",
    r'(?s)Load key "([^"]+)": ([^\n]*\S).*Permission denied': "ssh cannot use the key {0}: {1}",
    r"Permission denied \([^)]*publickey": "it takes no key that ssh has: run `ssh-add` if yours "
    "has a passphrase, otherwise `ssh-copy-id {login}`",
    r"Permission denied \((.+)\)": "it wants more than a key ({0}): set AuthenticationMethods "
    "publickey for this user in its sshd_config",
    "Connection refused": "nothing listens on its SSH port: start sshd there",
    "banner exchange": "what listens on its SSH port does not answer: restart sshd there",
    "timed out|No route to host|unreachable": "it does not answer: is it on, and host: right?",
    "remote port forwarding failed": "it forwards no port: set AllowTcpForwarding yes in its "
    "sshd_config, or MUSTER_AGENT_ADDRESS here",
}
"""What we say for what ssh says, the first that fits; numbers stand for groups of the pattern."""


class SocketDirectory:
    """Where the control sockets of this coordinator are; those of earlier ones are removed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: tempfile.TemporaryDirectory[str] | None = None
        self._descriptor = -1
        self.count = 0

    def new_socket(self) -> Path:
        """Return a path that no socket has had, as short as ssh needs it. Raises OSError."""
        if self._made is None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root.mkdir(parents=True)
            self._made = tempfile.TemporaryDirectory(dir=self._root)
            self._descriptor = os.open(self._made.name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.count += 1
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}/{self.count}")

    def close(self) -> None:
        """Remove it. The descriptor stays: paths with its number are still in use."""
        if self._made is not None:
            self._made.cleanup()


class SshMaster:
    """The connection to one host; it is opened by the first order, and again once it has ended."""

    def __init__(
        self,
        node: ClusterNode,
        environ: Mapping[str, str],
        sockets: SocketDirectory,
        forward_to: CoordinatorAddress | None,
    ) -> None:
        """`forward_to` is where agents reach us, if there are any; as in `CommandLaunchers`."""
        self._host = login_words(node)
        self._login = node.host if node.user is None else f"{node.user}@{node.host}"
        self._environ = environ
        self._sockets = sockets
        self._socket = Path()
        self._forward_to = forward_to
        self._opening: asyncio.Task[str] | None = None
        self._ended: asyncio.Task[None] | None = None
        self._shells: WeakSet[RemoteShell] = WeakSet()
        self.by_hand = shlex.join(["ssh", self._login, "true"])
        self.address: CoordinatorAddress | None = forward_to
        """Where agents on the host reach us, if need be through this connection."""

    async def open(self) -> str:
        """Connect unless we are; return why that is not possible, "" if it is."""
        if self._ended is not None and not self._ended.done():
            return ""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_task(self._open())
        return await asyncio.shield(self._opening)  # others wait for it, too

    def shell(self, command: Sequence[str]) -> RemoteShell:
        """Run a command on the host. Raises OSError.

        The shell breaks with the connection, also if ssh has made another one for it: the agent has
        to learn our next address.
        """
        words = shlex.join(command)  # ssh has a shell read it
        shell = CommandShell([*self._words("ControlMaster=no"), words], self._environ)
        self._shells.add(shell)
        return shell

    def close(self) -> None:
        for task in (self._opening, self._ended):
            if task is not None:
                task.cancel()

    def _words(self, control: str) -> list[str]:
        return [*SSH, "-o", control, "-o", f"ControlPath={self._socket}", *self._host]

    async def _open(self) -> str:
        with ExitStack() as opened:
            try:
                self._socket = self._sockets.new_socket()
                # What a login shell prints may end without a newline.
                words = [*self._words("ControlMaster=yes"), "echo; cat"]
                master = CommandShell(words, self._environ)
                opened.callback(self._end, master)
                async with asyncio.timeout(LOGIN_SECONDS):
                    with suppress(BrokenPipeError):  # ssh has ended, and has written why
                        await master.give(HostReady(version=VERSION))  # cat gives it back
                    why = await master.problem() or await self._forward()
            except OSError as error:
                late = f"it did not let us in within {LOGIN_SECONDS:g} s"
                return str(error) or f"{late} ({master.last_error()})"
            if why:
                said = f"{master.errors()}\n{why}"
                for pattern, reason in _REASONS.items():
                    if found := re.search(pattern, said):
                        return reason.format(
                            *found.groups(), host=self._host[-1], login=self._login
                        )
                return why
            self._ended = asyncio.get_running_loop().create_task(master.ended())
            end = opened.pop_all().close
            self._ended.add_done_callback(lambda _: end())
        return ""

    async def _forward(self) -> str:
        """Have the host forward a free port of its own to us; return why it does not."""
        if self._forward_to is None or self._forward_to.host != LOOPBACK:
            return ""
        # The answer is its output. On the master's command line it would be a remark among errors.
        where = f"{LOOPBACK}:0:{LOOPBACK}:{self._forward_to.port}"
        words = ["ssh", "-F", "none", "-o", f"ControlPath={self._socket}", "-O", "forward", "-R"]
        with closing(CommandShell([*words, where, *self._host], self._environ)) as shell:
            port = await shell.read()
            if port is None or not port.isdigit():
                return shell.last_error()
        number = self._forward_to.number[0], self._sockets.count
        self.address = CoordinatorAddress(host=LOOPBACK, port=int(port), number=number)
        return ""

    def _end(self, master: RemoteShell) -> None:
        """Break all that went through a connection that has ended."""
        master.close()
        with suppress(OSError):
            self._socket.unlink(missing_ok=True)
        for shell in list(self._shells):
            shell.hang_up()
        self._shells.clear()
