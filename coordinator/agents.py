"""The socket where agents find the coordinator: who is let in, and whose words are believed.

A connection belongs to a job only after its first frame has named the job, the generation in
force and the token of the agent that was started for it. Anybody else is sent away; an agent of a
job that is over, or of an older generation, is told to end what it holds.
"""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final, Protocol

from muster.contracts.agent import CoordinatorAddress
from muster.contracts.encoding import decode_agent_message, encode
from muster.contracts.errors import WireError
from muster.contracts.framing import FrameReader, frame
from muster.contracts.job import JobUid
from muster.contracts.messages import AgentHello, AgentMessage, CoordinatorMessage, Dismiss, Welcome
from muster.processes import myself

HELLO_TIMEOUT_SECONDS: Final = 10.0
"""Whoever connects says who it is, or goes; so long, too, may one that is sent away stay."""

READ_BYTES: Final = 1 << 16


class Listener(Protocol):
    """Who wants to know what agents say."""

    def expects(self, hello: AgentHello) -> bool:
        """Return whether this agent is the one started for its job."""

    def joined(self, uid: JobUid, generation: int) -> None: ...

    def dropped(self, uid: JobUid, generation: int) -> None: ...

    def said(self, uid: JobUid, generation: int, message: AgentMessage) -> None: ...


class AgentServer:
    """Accepts agents and keeps one connection per job."""

    def __init__(self, epoch: int, listener: Listener) -> None:
        self._epoch = epoch
        self._listener = listener
        self._writers: dict[JobUid, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> CoordinatorAddress:
        """Listen on a free port of the loopback interface; return where."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return CoordinatorAddress(host=host, port=port, process=myself())

    async def stop(self) -> None:
        """Hang up on everybody; agents and ranks go on."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers.values()):
            writer.close()

    async def flush(self) -> None:
        """Wait until what was sent has left; what cannot leave is given up with its connection."""
        for writer in list(self._writers.values()):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await writer.drain()

    def send(self, uid: JobUid, message: CoordinatorMessage) -> None:
        """Send to the job's agent. Without a connection nothing is sent: it will ask again."""
        writer = self._writers.get(uid)
        if writer is not None:
            writer.write(frame(encode(message)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        messages = _messages(reader)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                hello = await anext(messages, None)
            if isinstance(hello, AgentHello):
                await self._converse(hello, messages, writer)
        except (OSError, WireError, TimeoutError):
            pass  # whatever the peer did wrong, the end of its connection is the answer
        finally:
            writer.close()

    async def _converse(
        self,
        hello: AgentHello,
        messages: AsyncIterator[AgentMessage],
        writer: asyncio.StreamWriter,
    ) -> None:
        writer.write(frame(encode(Welcome(epoch=self._epoch))))
        if not self._listener.expects(hello):
            writer.write(frame(encode(Dismiss())))
            await _until_it_has_hung_up(messages)
            return
        uid = JobUid(hello.job_uid)
        self._writers[uid] = writer
        self._listener.joined(uid, hello.generation)
        try:
            async for message in messages:
                self._listener.said(uid, hello.generation, message)
        finally:
            if self._writers.get(uid) is writer:
                del self._writers[uid]
                self._listener.dropped(uid, hello.generation)


def token_digest(token: str) -> str:
    """Return what is kept of an agent's token."""
    return hashlib.sha256(token.encode()).hexdigest()


def token_fits(token: str, digest: str | None) -> bool:
    """Return whether `token` is the one kept as `digest`, in constant time."""
    return digest is not None and hmac.compare_digest(token_digest(token), digest)


async def _until_it_has_hung_up(messages: AsyncIterator[AgentMessage]) -> None:
    """Wait for who is sent away: it obeys us only if it sees whose socket this is, while open."""
    async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
        async for _ in messages:
            pass


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[AgentMessage]:
    frames = FrameReader()
    while data := await reader.read(READ_BYTES):
        for payload in frames.feed(data):
            yield decode_agent_message(payload)
