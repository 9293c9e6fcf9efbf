"""A shell on a host: a socket at whose other end `worker.attach` takes an order there.

A client process, such as ssh, carries its bytes, or a link to the node of that host.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from muster.contracts.errors import printable
from muster.contracts.interpreter import VERSION
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.messages.attach import REPEAT_SECONDS, Answer, HostReady, LogsKept, Order

SILENCE_SECONDS: Final = 3 * REPEAT_SECONDS
"""A shell that says nothing for longer is broken."""

IGNORED_LIMIT_BYTES: Final = 1 << 16  # of what a login shell prints before an answer
ANSWER_LIMIT_BYTES: Final = 1 << 19  # such as a part of a log

_DECODER: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)


class RemoteShell:
    """The way to `worker.attach` on a host. A subclass carries the bytes of its socket there."""

    def __init__(self) -> None:
        self._received = b""
        self._ignored = bytearray()  # since the last answer: what a login shell prints, for example
        self._socket, self._theirs = socket.socketpair()
        self._socket.setblocking(False)  # noqa: FBT003  the standard library's signature

    async def give(self, order: Order | HostReady | LogsKept) -> None:
        """Send an order. Raises OSError if the shell is broken."""
        content = msgspec.json.encode(order) + b"\n"
        await asyncio.get_running_loop().sock_sendall(self._socket, content)

    async def answer(self) -> Answer | None:
        """Return the next answer; None if the shell is broken, or silent for too long."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(SILENCE_SECONDS):
                while (text := await self.read()) is not None:
                    with suppress(msgspec.DecodeError):
                        answer = _DECODER.decode(text)
                        self._ignored.clear()
                        return answer
                    self._ignored += text + b"\n"
                    if len(self._ignored) > IGNORED_LIMIT_BYTES:
                        return None
        return None

    async def read(self) -> bytes | None:
        """Return the next line of text; None at the end. Raises OSError."""
        while b"\n" not in self._received:
            if not await self._receive():
                return None
        text, _, self._received = self._received.partition(b"\n")
        return text

    async def ended(self) -> None:
        """Return once the client has ended; what it prints until then is ignored."""
        with suppress(OSError):
            while await self._receive():
                self._received = b""

    async def _receive(self) -> bool:
        await asyncio.sleep(0)  # what follows does not let others run while there is data
        data = await asyncio.get_running_loop().sock_recv(self._socket, IGNORED_LIMIT_BYTES)
        self._received += data
        return bool(data) and len(self._received) < ANSWER_LIMIT_BYTES

    async def problem(self) -> str:
        """Wait until the host is ready; return why it takes no order, "" if it does."""
        answer = await self.answer()
        if len(self._ignored + self._received) > IGNORED_LIMIT_BYTES:
            return "its login shell prints too much: let it print nothing if it is not interactive"
        if not isinstance(answer, HostReady):
            why = self.last_error()
            is_missing = sys.executable in why or "No module named" in why
            return why + f": install Muster {VERSION} there, under the same path" * is_missing
        if answer.version != VERSION:
            return f"it has Muster {answer.version}: install {VERSION} there, as here"
        return ""

    def errors(self) -> str:
        """Return the end of what the carrier has said about what failed."""
        raise NotImplementedError

    def last_error(self) -> str:
        """Return the last line of it, after that of what the host printed instead of an answer.

        nologin writes its reason there, and so do commands that sshd forces on a user.
        """
        printed = (self._ignored + self._received).decode(errors="replace")
        lines = [text.strip().splitlines()[-1] for text in (printed, self.errors()) if text.strip()]
        return printable("; ".join(lines) or "it wrote no error")

    def hang_up(self) -> None:
        """End the connection: its reader finds the end."""
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; what was started on the host runs on."""
        self._socket.close()


class HostConnection(Protocol):
    """The way to one host, through which its shells go."""

    by_hand: str
    """The command by which a person sees what is wrong with it."""

    @property
    def address(self) -> CoordinatorAddress | None:
        """Where agents on the host reach us; known once it is open."""

    async def open(self) -> str:
        """Connect unless we are; return why that is not possible, "" if it is."""

    def shell(self, command: Sequence[str]) -> RemoteShell:
        """Run a command on the host. Raises OSError."""

    def close(self) -> None:
        """End it; agents run on."""


class CommandShell(RemoteShell):
    """Through a client process."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the client. Raises OSError."""
        super().__init__()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the client
        with self._theirs as theirs:
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

    def errors(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")

    def close(self) -> None:
        super().close()
        if self._client.returncode is None:  # not reaped, so the number is still its own
            # The whole group: a shell would leave its command behind.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._client.pid, signal.SIGKILL)
            self._client.wait()
        self._errors.close()
