"""Where agents and the API reach the coordinator: agent connections, address file, wake-ups.

Connections of other users are closed before anything is read of them: a flood of them costs little.
A connection belongs to a job only after its first frame has named the job, the present agent number
and that agent's token. Any other agent is dismissed and ends its ranks. An agent on another host
first agrees on keys, from its token's digest and a nonce of each; all that follows is sealed.
"""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from coordinator.checkpoint_receiver import CheckpointReceiver, JobDirectories
from coordinator.log_receiver import Disk, LogListener, receive_logs
from muster.contracts.attach import LaunchAgent, OrderFailed
from muster.contracts.errors import AuthenticationFailed, WireError
from muster.contracts.interpreter import is_compatible, release
from muster.contracts.job import JobUid
from muster.contracts.log_parts import FRAME_LIMIT_BYTES, DrainLogs, ReceiverMessage
from muster.contracts.messages import (
    NONCE_BYTES,
    AgentHello,
    AgentMessage,
    AgentVersion,
    CoordinatorAddress,
    CoordinatorMessage,
    Dismiss,
    JoinRequest,
    KeyAnswer,
    KeyRequest,
    LogHello,
    StoreHello,
    Welcome,
)
from muster.contracts.wire import (
    CONTROL_FRAME_LIMIT_BYTES,
    PREFIX_BYTES,
    FrameReader,
    decode_agent_message,
    decode_first_frame,
    encode,
    frame,
    frame_length,
)
from muster.host.files import publish_address, read_coordinator_address
from muster.host.peers import SEND_TIMEOUT_SECONDS, is_same_user, keep_alive
from muster.host.sealed_line import Cipher, SealedLine

HELLO_TIMEOUT_SECONDS: Final = 10.0  # a peer that has not said hello by then is disconnected

HELLO_LIMIT_BYTES: Final = 4096  # ids and a token take a few hundred

PENDING_LIMIT: Final = 64
"""Connections from other hosts that have not said hello; above it the oldest is closed."""

BACKLOG: Final = 1024

ACCEPT_PAUSE_SECONDS: Final = 1.0
"""Without a free descriptor, or the address for other hosts: each attempt writes a line into the
log."""

DISMISSAL_TIMEOUT_SECONDS: Final = 5.0
"""A dismissed agent that has not disconnected by then is disconnected."""

READ_BYTES: Final = 1 << 16

ADDRESS_LOOK_SECONDS: Final = 2.0  # between looks at the address file

_LOG: Final = structlog.get_logger("coordinator")


class Listener(LogListener, Protocol):
    """Receives what agents report."""

    def token_sha256(self, claim: AgentHello | KeyRequest | JoinRequest) -> str | None:
        """Return the digest of the token of the agent that `claim` names, if there is one."""

    def joining(
        self, request: JoinRequest
    ) -> AbstractAsyncContextManager[LaunchAgent | OrderFailed]:
        """Answer the parent of an agent that a scheduler has started, until it is done with it."""

    def checkpoint_directories(self, hello: StoreHello) -> JobDirectories | None:
        """Return where the job of a storage process saves; None if it was not started for it."""

    def is_expected(self, hello: AgentHello) -> bool:
        """Return True for the agent that was started for its job."""

    def on_refused(self, uid: JobUid, why: str) -> None:
        """Write the sentence `why`, about a dismissed agent, into the log and the job's events."""

    def on_connected(self, hello: AgentHello) -> None: ...

    def on_disconnected(self, hello: AgentHello) -> None: ...

    def on_message(self, hello: AgentHello, message: AgentMessage) -> None:
        """Take a message of the agent that said `hello` when it connected."""


class _InClear:
    """The cipher of a connection within this host."""

    def seal(self, data: bytes | memoryview) -> bytes:
        return bytes(data)

    def open(self, sealed: bytes | bytearray) -> bytes:
        return bytes(sealed)


@dataclass(slots=True, kw_only=True)
class _Connection:
    """One connection of an agent; payloads are sealed once both ends have the keys."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    cipher: Cipher = field(default_factory=_InClear)
    frames: FrameReader = field(default_factory=FrameReader)
    hello: AgentHello | None = None

    def send(self, message: CoordinatorMessage | KeyAnswer | ReceiverMessage) -> None:
        self.writer.write(frame(self.cipher.seal(encode(message))))

    async def receive_one(self, limit_bytes: int = HELLO_LIMIT_BYTES) -> bytes:
        """Return the payload of a frame, by default one before, or with, the hello.

        Raises `WireError`, `EOFError`, OSError.
        """
        length = frame_length(await self.reader.readexactly(PREFIX_BYTES), limit_bytes)
        return self.cipher.open(await self.reader.readexactly(length))

    async def receive(self) -> list[bytes] | None:
        """Return the payloads that have come; None at the end.

        Raises OSError, and `AuthenticationFailed` also for a length that is above the limit: it may
        have been changed on the way.
        """
        data = await self.reader.read(READ_BYTES)
        try:
            return [*map(self.cipher.open, self.frames.feed(data))] if data else None
        except WireError as error:
            raise AuthenticationFailed(str(error)) from error

    async def dismiss(self) -> None:
        """Dismiss an agent and let it disconnect first.

        It obeys only a peer whose process it can identify by the connection, which it cannot once
        we have closed it.
        """
        self.send(Dismiss())
        async with asyncio.timeout(DISMISSAL_TIMEOUT_SECONDS):
            while await self.reader.read(READ_BYTES):
                pass


class AgentServer:
    """Accepts agents and keeps one connection per job and host."""

    def __init__(
        self, epoch: int, listener: Listener, endpoint: tuple[str, int] | None = None
    ) -> None:
        """`endpoint` is where agents of other hosts connect, if there are any."""
        self._epoch = epoch
        self._listener = listener
        self._endpoint = endpoint
        self._connections: dict[tuple[JobUid, str], _Connection] = {}
        self._senders: dict[tuple[JobUid, str], tuple[asyncio.Task[None], _Connection]] = {}
        """Of logs, by job and host."""
        self._receivers: list[CheckpointReceiver] = []
        self._claims: dict[str, CheckpointReceiver] = {}
        self._disk = Disk()
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[asyncio.Task[None], None] = {}  # from other hosts, in their order

    async def start(self, forwarded: socket.socket | None = None) -> CoordinatorAddress:
        """Listen on a free loopback port, and return it; at `forwarded` our own ssh connects."""
        if self._endpoint is not None:
            self._run(self._accept_others(*self._endpoint))
        if forwarded is not None:
            self._sockets.append(forwarded)
            self._run(self._accept(forwarded, is_remote=True))
        local = listen("127.0.0.1", 0)
        self._sockets.append(local)
        self._run(self._accept(local, is_remote=False))
        host, port = local.getsockname()[:2]
        return CoordinatorAddress(host=host, port=port)

    async def stop(self) -> None:
        """Close all connections; agents and ranks run on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        for receiver in self._receivers:
            receiver.end()
        self._disk.close()

    async def flush(self) -> None:
        """Wait, at most a second per connection, until what was sent has left."""
        for connection in list(self._connections.values()):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await connection.writer.drain()

    def send(self, uid: JobUid, host: str, message: CoordinatorMessage) -> bool:
        """Send to a job's agent; return False without a connection: it will reconnect."""
        connection = self._connections.get((uid, host))
        if connection is not None:
            connection.send(message)
        return connection is not None

    def drain_logs(self, uid: JobUid, host: str) -> None:
        """Ask a host for its last logs; a sender that connects later is asked then."""
        if (uid, host) in self._senders:
            self._senders[uid, host][1].send(DrainLogs())

    async def _accept_others(self, host: str, port: int) -> None:
        """Accept agents of other hosts; the coordinator before us may still have the port."""
        while True:
            try:
                listening = listen(host, port)
            except OSError as error:
                words = f"cannot listen at {host}:{port} for agents of other hosts ({error}); "
                words += "if that goes on, correct MUSTER_AGENT_ADDRESS"
                _LOG.warning(words, action="not_accepting")
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
            else:
                self._sockets.append(listening)
                await self._accept(listening, is_remote=True)

    async def _accept(self, listening: socket.socket, *, is_remote: bool) -> None:
        # Not `asyncio.start_server`, which starts to read before it asks, and writes a hundred
        # tracebacks at once when there is no descriptor left.
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listening)
            except OSError as error:
                _LOG.warning("cannot accept agents", action="not_accepting", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if not is_same_user(peer, or_remote=is_remote):
                peer.close()
            elif is_remote:  # our own ssh is: any user of its host may be behind it
                keep_alive(peer, SEND_TIMEOUT_SECONDS)
                self._pending[self._run(self._serve(peer, is_remote=True))] = None
                if len(self._pending) > PENDING_LIMIT:
                    next(iter(self._pending)).cancel()
            else:
                self._run(self._serve(peer, is_remote=False))
            await asyncio.sleep(0)  # the loop's other work has its turn, however many connect

    def _run(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pending.pop(task, None)

    async def _serve(self, peer: socket.socket, *, is_remote: bool) -> None:
        reader, writer = await asyncio.open_connection(sock=peer)
        connection = _Connection(reader=reader, writer=writer)
        # of a faulty peer
        with closing(writer), suppress(OSError, EOFError, WireError, AuthenticationFailed):
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                said, payload = await self._receive_hello(connection, is_remote=is_remote)
            if task := asyncio.current_task():
                self._pending.pop(task, None)
            if isinstance(said, LogHello):
                await self._receive_logs(said, connection)
            elif isinstance(said, StoreHello):
                self._receive_checkpoints(said, connection)
            elif isinstance(said, JoinRequest):
                await self._let_join(said, connection)
            else:
                await self._converse(said, payload, connection)

    async def _receive_hello(
        self, connection: _Connection, *, is_remote: bool
    ) -> tuple[AgentVersion | LogHello | StoreHello | JoinRequest, bytes]:
        """Return what every version can read of an agent's hello, and all of it.

        Raises `WireError` if it is no hello, `AuthenticationFailed`, `EOFError`, OSError.
        """
        payload = await connection.receive_one()
        said = decode_first_frame(payload)
        if is_sealed := isinstance(said, KeyRequest):
            self._seal(connection, said, payload)
            payload = await connection.receive_one()
            said = decode_first_frame(payload)
        elif is_remote:
            raise WireError("an agent of another host has not asked for keys")
        if isinstance(said, KeyRequest):
            raise WireError("an agent asked for keys again")
        if not (is_sealed or isinstance(said, AgentVersion)):
            raise WireError("a process of another host has not asked for keys")
        return said, payload

    def _seal(self, connection: _Connection, request: KeyRequest, payload: bytes) -> None:
        """Answer a request for keys. Raises `WireError` if no such agent is known."""
        # Here and not above: most coordinators have agents on their own host only.
        from muster.contracts.sealing import agent_cipher  # noqa: PLC0415

        digest = self._listener.token_sha256(request)
        if digest is None:
            raise WireError("an agent is not expected")
        answer = KeyAnswer(nonce=secrets.token_bytes(NONCE_BYTES))
        connection.send(answer)
        connection.cipher = agent_cipher(digest, payload, encode(answer), is_agent=False)

    async def _receive_logs(self, hello: LogHello, connection: _Connection) -> None:
        key, task = (JobUid(hello.job_uid), hello.host), asyncio.current_task()
        if self._listener.log_home(hello) is None or task is None:
            return
        if key in self._senders:  # its connection is broken, or its process was killed
            self._senders[key][0].cancel()
        self._senders[key] = task, connection
        try:
            receive = partial(connection.receive_one, FRAME_LIMIT_BYTES)
            await receive_logs(hello, self._listener, self._disk, receive, connection.send)
        except (OSError, WireError, AuthenticationFailed) as error:
            words = f"the logs of job {hello.job_uid} on {hello.host} do not come: {error}"
            _LOG.warning(words, action="logs_missing")
        finally:
            if self._senders.get(key) == (task, connection):
                del self._senders[key]

    def _receive_checkpoints(self, hello: StoreHello, connection: _Connection) -> None:
        """Hand a connection, on which nothing more has come yet, to a thread of its own."""
        directories = self._listener.checkpoint_directories(hello)
        if directories is None:
            return
        channel = connection.writer.get_extra_info("socket").dup()
        connection.writer.close()  # the event loop reads no more
        channel.settimeout(None)
        line = SealedLine(channel, connection.cipher, CONTROL_FRAME_LIMIT_BYTES)
        receiver = CheckpointReceiver(line, directories, hello.host, self._claims)
        self._receivers = [it for it in self._receivers if it.is_alive()] + [receiver]
        receiver.start()

    async def _let_join(self, request: JoinRequest, connection: _Connection) -> None:
        async with self._listener.joining(request) as answer:
            connection.writer.write(frame(connection.cipher.seal(msgspec.json.encode(answer))))
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                await connection.reader.read()  # to its end: the probe file is needed until then

    async def _converse(self, said: AgentVersion, payload: bytes, connection: _Connection) -> None:
        hello = None
        if is_compatible(said.version, said.protocol):
            hello = decode_agent_message(payload)
        else:
            theirs = f"Muster {release(said.version, said.protocol)}"
            why = f"dismissed the agent on host {said.host}, which has {theirs}; the coordinator "
            why += f"has {release()}: upgrade that host"
            self._listener.on_refused(JobUid(said.job_uid), why)
        connection.send(Welcome(epoch=self._epoch))
        if isinstance(hello, AgentHello) and self._is_accepted(hello):
            await self._listen_to(hello, connection)
        else:
            await connection.dismiss()

    def _is_accepted(self, hello: AgentHello) -> bool:
        """Return whether an agent is the expected one, and no other machine has its place."""
        if not self._listener.is_expected(hello):
            return False
        first = self._connections.get((JobUid(hello.job_uid), hello.host))
        if first is None or first.hello is None or first.hello.machine_key == hello.machine_key:
            return True
        if first.hello.generation != hello.generation:
            return True  # the host has booted again, and the old connection is still open
        words = f"dismissed an agent of job {hello.job_uid} that runs on {hello.node}: the agent "
        words += f"of host {hello.host} is connected from {first.hello.node}; give each machine a "
        _LOG.warning(f"{words}name of its own", action="agent_dismissed")
        return False

    async def _listen_to(self, hello: AgentHello, connection: _Connection) -> None:
        key = JobUid(hello.job_uid), hello.host
        connection.hello = hello
        self._connections[key] = connection
        self._listener.on_connected(hello)
        try:
            while (payloads := await connection.receive()) is not None:
                for payload in payloads:
                    message = decode_agent_message(payload)
                    self._listener.on_message(hello, message)
        except WireError as error:
            # An agent of another version would reconnect for ever; a new one resumes its job.
            words = f"dismissed the agent of job {hello.job_uid} on {hello.host}: {error}"
            _LOG.warning(words, action="agent_dismissed")
            await connection.dismiss()
        except AuthenticationFailed as error:
            words = f"disconnected the agent of job {hello.job_uid} on {hello.host}: {error}"
            _LOG.warning(words, action="agent_disconnected")
        finally:
            if self._connections.get(key) is connection:
                del self._connections[key]
                self._listener.on_disconnected(hello)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that agents can connect to; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listening.setblocking(False)  # noqa: FBT003  the standard library's signature
    return listening


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
