"""Links of an event loop.

Connections of other users are closed before anything is read of them: a flood of them costs little.
So is a link that does not say its first payload in time, and, of those from other hosts, the oldest
of too many.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from muster.contracts.errors import AuthenticationFailed, WireError
from muster.host.peers import SEND_TIMEOUT_SECONDS, is_same_user, keep_alive
from muster.links.blocking import BlockingLink
from muster.links.frames import CONTROL_FRAME_LIMIT_BYTES
from muster.links.session import ProtocolDiffers, Session

HELLO_TIMEOUT_SECONDS: Final = 10.0  # a peer that has not said its first payload is disconnected

PENDING_LIMIT: Final = 64
"""Connections from other hosts without a first payload; above it the oldest is closed."""

BACKLOG: Final = 1024

ACCEPT_PAUSE_SECONDS: Final = 1.0
"""Without a free descriptor: each attempt writes a line into the log."""

READ_BYTES: Final = 1 << 16

_sockets: Final[WeakSet[socket.socket]] = WeakSet()

Task: TypeAlias = asyncio.Task[None]
Work: TypeAlias = Coroutine[Any, Any, None]


@dataclass(slots=True, kw_only=True)
class ServedLink:
    """One connection. Its methods raise OSError and `AuthenticationFailed`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    session: Session

    def send(self, payload: bytes) -> None:
        """Send as soon as there is room; nothing once the link ends.

        Raises `WireError` if it is too long.
        """
        if self.writer.is_closing():  # else asyncio writes a line about each to standard error
            return
        self.session.send(payload)
        self.writer.write(self.session.take())

    async def receive_one(self) -> bytes:
        """Return the next payload, and read nothing behind it. Raises `EOFError`."""
        payloads: list[bytes] = []
        while not payloads:
            data = await self.reader.readexactly(self.session.frames.missing_bytes)
            payloads = self._take_in(data)
        return payloads[0]

    async def receive(self) -> list[bytes] | None:
        """Return the payloads that have come; None at the end."""
        data = await self.reader.read(READ_BYTES)
        return self._take_in(data) if data else None

    def detach(self) -> BlockingLink:
        """Return the connection, of which nothing is read yet behind its hello, for a thread."""
        channel = self.writer.get_extra_info("socket").dup()
        self.writer.close()  # the event loop reads no more
        channel.settimeout(None)
        return BlockingLink(channel, self.session)

    def _take_in(self, data: bytes) -> list[bytes]:
        try:
            return self.session.receive(data)
        finally:
            self.writer.write(self.session.take())


class LinkServer:
    """Accepts connections, and serves each in a task of its own."""

    def __init__(
        self,
        begin: Callable[[bool], Session],
        serve: Callable[[ServedLink, bytes], Work],
        warn: Callable[[str], None],
    ) -> None:
        """`begin` gets whether any process may be at the other end, or only our user's.

        `serve` gets the first payload, and may raise what a link raises.
        """
        self._begin = begin
        self._serve = serve
        self._warn = warn
        self._warned: set[str] = set()  # there are no more of them than protocol numbers
        self._sockets: list[socket.socket] = []
        self._tasks: set[Task] = set()
        self._pending: dict[Task, None] = {}  # from other hosts, in their order

    def accept(self, listening: socket.socket, *, is_remote: bool) -> Task:
        """Accept what connects, until the server stops or the task is cancelled."""
        self._sockets.append(listening)
        return self.run(self._accept(listening, is_remote=is_remote))

    def run(self, work: Work) -> Task:
        """Do something that ends with the server."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def stop(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()

    def _forget(self, task: Task) -> None:
        self._tasks.discard(task)
        self._pending.pop(task, None)

    async def _accept(self, listening: socket.socket, *, is_remote: bool) -> None:
        async for peer in accepted(listening, self._warn):
            if not is_same_user(peer, or_remote=is_remote):
                peer.close()
            elif is_remote:  # our own ssh is: any user of its host may be behind it
                keep_alive(peer, SEND_TIMEOUT_SECONDS)
                self._pending[self.run(self._open(peer, is_remote=True))] = None
                if len(self._pending) > PENDING_LIMIT:
                    oldest = next(iter(self._pending))
                    del self._pending[oldest]  # now: it takes some turns to end
                    oldest.cancel()
            else:
                self.run(self._open(peer, is_remote=False))

    async def _open(self, peer: socket.socket, *, is_remote: bool) -> None:
        reader, writer = await asyncio.open_connection(sock=peer)
        link = ServedLink(reader=reader, writer=writer, session=self._begin(is_remote))
        # of a faulty peer
        with closing(writer), suppress(OSError, EOFError, WireError, AuthenticationFailed):
            try:
                async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                    payload = await link.receive_one()
            except ProtocolDiffers as error:
                if str(error) not in self._warned:
                    self._warned.add(str(error))
                    self._warn(f"a connection was refused: {error}")
                return
            link.session.frames.limit_bytes = CONTROL_FRAME_LIMIT_BYTES
            if task := asyncio.current_task():
                self._pending.pop(task, None)
            await self._serve(link, payload)


async def accepted(
    listening: socket.socket, warn: Callable[[str], None]
) -> AsyncIterator[socket.socket]:
    """Yield what connects; nothing is read of it yet."""
    # Not `asyncio.start_server`, which starts to read before it asks, and writes a hundred
    # tracebacks at once when there is no descriptor left.
    loop = asyncio.get_running_loop()
    while True:
        # Not `sock_accept`: a cancellation would lose what it has accepted, and keep it open.
        is_ready = asyncio.Event()
        loop.add_reader(listening, is_ready.set)
        try:
            await is_ready.wait()
        finally:
            loop.remove_reader(listening)
        try:
            peer, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has left already
            continue
        except OSError as error:
            warn(f"cannot accept connections: {error}")
            await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
            continue
        peer.setblocking(False)  # noqa: FBT003  the standard library's signature
        _sockets.add(peer)
        yield peer
        await asyncio.sleep(0)  # the loop's other work has its turn, however many connect


async def connect(address: tuple[str, int], session: Session) -> ServedLink:
    """Begin a link to an IPv4 address, which opens while it receives. Raises OSError."""
    calling = socket.socket()
    _sockets.add(calling)
    try:
        calling.setblocking(False)  # noqa: FBT003  the standard library's signature
        # What it connects from may be a port at which a process of this host is to listen.
        calling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await asyncio.get_running_loop().sock_connect(calling, address)
        reader, writer = await asyncio.open_connection(sock=calling)
    except BaseException:
        calling.close()
        raise
    writer.write(session.take())
    keep_alive(calling, SEND_TIMEOUT_SECONDS)
    return ServedLink(reader=reader, writer=writer, session=session)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that others can connect to; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listening.setblocking(False)  # noqa: FBT003  the standard library's signature
    _sockets.add(listening)
    return listening


def duplicate(listening: socket.socket) -> socket.socket:
    """Return the same socket under another descriptor."""
    same = listening.dup()
    _sockets.add(same)
    return same


def release() -> None:
    """Give the sockets up in a child of this process, or they would live as long as the child."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in list(_sockets):
        if each.fileno() >= 0:
            os.dup2(nothing, each.fileno(), inheritable=False)
    os.close(nothing)
