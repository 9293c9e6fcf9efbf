"""Where agents and the API reach the coordinator: agent connections, address file, wake-ups.

Connections of other users are closed before anything is read of them: a flood of them costs little.
A connection belongs to a job only after its first frame has named the job, the present agent number
and that agent's token. Any other agent is dismissed and ends its ranks.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from muster.contracts.errors import WireError
from muster.contracts.job import JobUid
from muster.contracts.messages import (
    AgentHello,
    AgentMessage,
    CoordinatorAddress,
    CoordinatorMessage,
    Dismiss,
    Welcome,
)
from muster.contracts.wire import (
    PREFIX_BYTES,
    FrameReader,
    decode_agent_message,
    encode,
    frame,
    frame_length,
)
from muster.host.files import read_coordinator_address
from muster.host.peers import is_same_user

HELLO_TIMEOUT_SECONDS: Final = 10.0  # a peer that has not said hello by then is disconnected

HELLO_LIMIT_BYTES: Final = 4096  # ids and a token take a few hundred

BACKLOG: Final = 1024

ACCEPT_PAUSE_SECONDS: Final = 1.0
"""Without a free descriptor: each attempt writes a line into the log."""

DISMISSAL_TIMEOUT_SECONDS: Final = 5.0
"""A dismissed agent that has not disconnected by then is disconnected."""

READ_BYTES: Final = 1 << 16

ADDRESS_LOOK_SECONDS: Final = 2.0  # between looks at the address file

_LOG: Final = structlog.get_logger("coordinator")


class Listener(Protocol):
    """Receives what agents report."""

    def is_expected(self, hello: AgentHello) -> bool:
        """Return True for the agent that was started for its job."""

    def on_connected(self, hello: AgentHello) -> None: ...

    def on_disconnected(self, hello: AgentHello) -> None: ...

    def on_message(self, hello: AgentHello, message: AgentMessage) -> None:
        """Take a message of the agent that said `hello` when it connected."""


class AgentServer:
    """Accepts agents and keeps one connection per job and host."""

    def __init__(self, epoch: int, listener: Listener) -> None:
        self._epoch = epoch
        self._listener = listener
        self._writers: dict[tuple[JobUid, str], asyncio.StreamWriter] = {}
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> CoordinatorAddress:
        """Listen on a free port of the loopback interface and return its address."""
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._socket.setblocking(False)  # noqa: FBT003  the standard library's signature
        self._run(self._accept(self._socket))
        host, port = self._socket.getsockname()[:2]
        return CoordinatorAddress(host=host, port=port)

    async def stop(self) -> None:
        """Close all connections; agents and ranks run on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    async def flush(self) -> None:
        """Wait, at most a second per connection, until what was sent has left."""
        for writer in list(self._writers.values()):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await writer.drain()

    def send(self, uid: JobUid, host: str, message: CoordinatorMessage) -> None:
        """Send to a job's agent; without a connection nothing is sent, as it will reconnect."""
        writer = self._writers.get((uid, host))
        if writer is not None:
            writer.write(frame(encode(message)))

    async def _accept(self, listener: socket.socket) -> None:
        # Not `asyncio.start_server`, which starts to read before it asks, and writes a hundred
        # tracebacks at once when there is no descriptor left.
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                _LOG.warning("cannot accept agents", action="not_accepting", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if is_same_user(connection):
                self._run(self._serve(connection))
            else:
                connection.close()
            await asyncio.sleep(0)  # the loop's other work has its turn, however many connect

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        with closing(writer), suppress(OSError, EOFError, WireError):  # of a faulty peer
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                hello = await _receive_hello(reader)
            await self._converse(hello, reader, writer)

    async def _converse(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(frame(encode(Welcome(epoch=self._epoch))))
        if not self._listener.is_expected(hello):
            await _dismiss(reader, writer)
            return
        key = JobUid(hello.job_uid), hello.host
        self._writers[key] = writer
        self._listener.on_connected(hello)
        try:
            frames = FrameReader()
            while data := await reader.read(READ_BYTES):
                for payload in frames.feed(data):
                    message = decode_agent_message(payload)
                    self._listener.on_message(hello, message)
        except WireError as error:
            # An agent of another version would reconnect for ever; a new one resumes its job.
            words = f"dismissed the agent of job {hello.job_uid} on {hello.host}: {error}"
            _LOG.warning(words, action="agent_dismissed")
            await _dismiss(reader, writer)
        finally:
            if self._writers.get(key) is writer:
                del self._writers[key]
                self._listener.on_disconnected(hello)


async def _receive_hello(reader: asyncio.StreamReader) -> AgentHello:
    """Return the first frame; raises `WireError` if it is no hello, `EOFError`, OSError."""
    length = frame_length(await reader.readexactly(PREFIX_BYTES), HELLO_LIMIT_BYTES)
    hello = decode_agent_message(await reader.readexactly(length))
    if not isinstance(hello, AgentHello):
        raise WireError("an agent sent another message before its hello")
    return hello


async def _dismiss(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Dismiss an agent and let it disconnect first.

    It obeys only a peer whose process it can identify by the connection, which it cannot once we
    have closed it.
    """
    writer.write(frame(encode(Dismiss())))
    async with asyncio.timeout(DISMISSAL_TIMEOUT_SECONDS):
        while await reader.read(READ_BYTES):
            pass


def publish_address(address: CoordinatorAddress, path: Path) -> None:
    """Replace the address file atomically. It need not survive a power cut: no agent does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch(mode=0o600)
    temporary.write_bytes(msgspec.json.encode(address))
    temporary.replace(path)


async def keep_address_published(
    address: CoordinatorAddress,
    path: Path,
    holds_lease: Callable[[], Awaitable[bool]],
    on_published: Callable[[], None],
) -> None:
    """Publish the address, and again if the file says another while the lease is ours.

    The disk was full, the file was removed, or an older copy took its place.
    """
    while True:
        if read_coordinator_address(path) != address and await holds_lease():
            try:
                publish_address(address, path)
                on_published()
            except OSError as error:
                _LOG.warning(
                    "cannot write the address file", action="unpublished", error=str(error)
                )
        await asyncio.sleep(ADDRESS_LOOK_SECONDS)


class _WakeUps(asyncio.DatagramProtocol):
    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def datagram_received(self, _data: bytes, _address: tuple[str, int]) -> None:
        self._wake()


async def listen_for_wake_ups(wake: Callable[[], None]) -> tuple[asyncio.DatagramTransport, str]:
    """Call `wake` for every datagram of the API, which sends one after each write.

    Return the transport and its ``host:port`` on the loopback interface.
    """
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _WakeUps(wake), local_addr=("127.0.0.1", 0)
    )
    host, port = transport.get_extra_info("sockname")
    return transport, f"{host}:{port}"
