"""Where agents, and the processes beside them on other hosts, reach the coordinator.

Each process proves first that it has the token of a job's present agent, and the coordinator that
it knows that token; any other is disconnected. Then an agent that is not wanted any more, or has
another Muster, is dismissed and ends its ranks. What leaves this host is sealed.
"""

import asyncio
import socket
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Final, Protocol

import msgspec
import structlog

from coordinator.agents.checkpoint_receiver import CheckpointReceiver, JobDirectories
from coordinator.agents.log_receiver import Disk, LogListener, receive_logs
from muster.contracts.errors import AuthenticationFailed, WireError
from muster.contracts.interpreter import is_compatible, release
from muster.contracts.job.status import JobUid
from muster.contracts.messages.agent import (
    AgentClaim,
    AgentHeartbeat,
    AgentHello,
    AgentMessage,
    AgentVersion,
    CoordinatorMessage,
    Dismiss,
    HeartbeatHeard,
    JoinRequest,
    LogHello,
    StoreHello,
    Welcome,
)
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.messages.attach import LaunchAgent, OrderFailed
from muster.contracts.messages.logs import DrainLogs, ReceiverMessage
from muster.contracts.messages.wire import (
    decode_agent_claim,
    decode_agent_message,
    decode_first_frame,
    encode,
)
from muster.links.identity import Identity, job_identity
from muster.links.reconnect import LINK_ERRORS
from muster.links.serving import (
    HELLO_TIMEOUT_SECONDS,
    READ_BYTES,
    LinkServer,
    ServedLink,
    listen,
)
from muster.links.session import Answerer

ACCEPT_PAUSE_SECONDS: Final = 1.0
"""Without the address for other hosts: each attempt writes a line into the log."""

DISMISSAL_TIMEOUT_SECONDS: Final = 5.0
"""A dismissed agent that has not disconnected by then is disconnected."""

_LOG: Final = structlog.get_logger("coordinator")


class Listener(LogListener, Protocol):
    """Receives what agents report."""

    def token_sha256(
        self, claim: AgentHello | AgentClaim | JoinRequest, *, is_remote: bool = False
    ) -> str | None:
        """Return the digest of the token of the agent that `claim` names, if there is one.

        An agent of this host has no reason to connect where others do (`is_remote`).
        """

    def joining(
        self, request: JoinRequest
    ) -> AbstractAsyncContextManager[LaunchAgent | OrderFailed]:
        """Answer the parent of an agent that a scheduler has started, until it is done with it."""

    def checkpoint_directories(self, claim: AgentClaim) -> JobDirectories | None:
        """Return where the job of a storage process saves; None if it was not started for it."""

    def is_expected(self, hello: AgentHello) -> bool:
        """Return True for the agent that was started for its job."""

    def on_refused(self, uid: JobUid, why: str) -> None:
        """Write the sentence `why`, about a dismissed agent, into the log and the job's events."""

    def on_connected(self, hello: AgentHello) -> None: ...

    def on_disconnected(self, hello: AgentHello) -> None: ...

    def on_message(self, hello: AgentHello, message: AgentMessage) -> None:
        """Take a message of the agent that said `hello` when it connected."""


class AgentServer:
    """Accepts agents and keeps one connection per job and host."""

    def __init__(
        self, epoch: int, listener: Listener, endpoint: tuple[str, int] | None = None
    ) -> None:
        """`endpoint` is where agents of other hosts connect, if there are any."""
        self._epoch = epoch
        self._listener = listener
        self._endpoint = endpoint
        self._links = LinkServer(self._begin, self._serve, _warn)
        self._agents: dict[tuple[JobUid, str], tuple[ServedLink, AgentHello]] = {}
        self._senders: dict[tuple[JobUid, str], tuple[asyncio.Task[None], ServedLink]] = {}
        """Of logs, by job and host."""
        self._receivers: list[CheckpointReceiver] = []
        self._claims: dict[str, CheckpointReceiver] = {}
        self._disk = Disk()

    async def start(self, forwarded: socket.socket | None = None) -> CoordinatorAddress:
        """Listen on a free loopback port, and return it; at `forwarded` our own ssh connects."""
        if self._endpoint is not None:
            self._links.run(self._accept_others(*self._endpoint))
        if forwarded is not None:
            self._links.accept(forwarded, is_remote=True)
        local = listen("127.0.0.1", 0)
        self._links.accept(local, is_remote=False)
        host, port = local.getsockname()[:2]
        return CoordinatorAddress(host=host, port=port, number=(self._epoch, 0))

    async def stop(self) -> None:
        """Close all connections; agents and ranks run on."""
        await self._links.stop()
        for receiver in self._receivers:
            receiver.end()
        self._disk.close()

    async def flush(self) -> None:
        """Wait, at most a second per connection, until what was sent has left."""
        for link, _ in list(self._agents.values()):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await link.writer.drain()

    def send(self, uid: JobUid, host: str, message: CoordinatorMessage) -> bool:
        """Send to a job's agent; return False without a connection: it will reconnect."""
        agent = self._agents.get((uid, host))
        if agent is not None:
            agent[0].send(encode(message))
        return agent is not None

    def drain_logs(self, uid: JobUid, host: str) -> None:
        """Ask a host for its last logs; a sender that connects later is asked then."""
        if (uid, host) in self._senders:
            self._senders[uid, host][1].send(encode(DrainLogs()))

    async def _accept_others(self, host: str, port: int) -> None:
        """Accept agents of other hosts; the coordinator before us may still have the port."""
        while True:
            try:
                listening = listen(host, port)
            except OSError as error:
                _warn(
                    f"cannot listen at {host}:{port} for agents of other hosts ({error}); "
                    "if that goes on, correct MUSTER_AGENT_ADDRESS"
                )
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
            else:
                self._links.accept(listening, is_remote=True)
                return

    def _begin(self, is_remote: bool) -> Answerer:  # noqa: FBT001  a callback
        return Answerer(partial(self._identify, is_remote), is_sealed=is_remote)

    def _identify(self, is_remote: bool, claim: bytes) -> Identity:  # noqa: FBT001
        digest = self._listener.token_sha256(decode_agent_claim(claim), is_remote=is_remote)
        if digest is None:
            raise WireError("an agent is not expected")
        return job_identity(claim, digest)

    async def _serve(self, link: ServedLink, payload: bytes) -> None:
        said = decode_first_frame(payload)
        claim = decode_agent_claim(link.session.claim)
        if isinstance(said, AgentVersion):
            await self._converse(said, payload, claim, link)
        elif isinstance(said, LogHello):
            await self._receive_logs(said, claim, link)
        elif isinstance(said, StoreHello):
            self._receive_checkpoints(claim, link)
        else:
            await self._let_join(said, link)

    async def _receive_logs(self, hello: LogHello, claim: AgentClaim, link: ServedLink) -> None:
        key, task = (JobUid(claim.job_uid), claim.host), asyncio.current_task()
        if self._listener.coordinator_files(claim) is None or task is None:
            return
        if key in self._senders:  # its connection is broken, or its process was killed
            self._senders[key][0].cancel()
        self._senders[key] = task, link

        def send(message: ReceiverMessage) -> None:
            link.send(encode(message))

        try:
            await receive_logs(hello, claim, self._listener, self._disk, link.receive_one, send)
        except LINK_ERRORS as error:
            words = f"the logs of job {claim.job_uid} on {claim.host} do not come: {error}"
            _LOG.warning(words, action="logs_missing")
        finally:
            if self._senders.get(key) == (task, link):
                del self._senders[key]

    def _receive_checkpoints(self, claim: AgentClaim, link: ServedLink) -> None:
        """Hand a connection, on which nothing more has come yet, to a thread of its own."""
        directories = self._listener.checkpoint_directories(claim)
        if directories is None:
            return
        receiver = CheckpointReceiver(link.detach(), directories, claim.host, self._claims)
        self._receivers = [old for old in self._receivers if old.is_alive()] + [receiver]
        receiver.start()

    async def _let_join(self, request: JoinRequest, link: ServedLink) -> None:
        async with self._listener.joining(request) as answer:
            link.send(msgspec.json.encode(answer))
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                await _read_to_end(link)  # the probe file is needed until then

    async def _converse(
        self, said: AgentVersion, payload: bytes, claim: AgentClaim, link: ServedLink
    ) -> None:
        hello = None
        if is_compatible(said.version, said.protocol):
            hello = decode_agent_message(payload)
        else:
            theirs = f"Muster {release(said.version, said.protocol)}"
            why = f"dismissed the agent on host {claim.host}, which has {theirs}; the coordinator "
            why += f"has {release()}: upgrade that host"
            self._listener.on_refused(JobUid(claim.job_uid), why)
        link.send(encode(Welcome(epoch=self._epoch)))
        if isinstance(hello, AgentHello) and self._is_accepted(hello):
            await self._listen_to(hello, link)
        else:
            await _dismiss(link)

    def _is_accepted(self, hello: AgentHello) -> bool:
        """Return whether an agent is the expected one, and no other machine has its place."""
        if not self._listener.is_expected(hello):
            return False
        key = JobUid(hello.job_uid), hello.host
        if key not in self._agents:
            return True
        _, first = self._agents[key]
        if first.machine_key == hello.machine_key or first.agent_number != hello.agent_number:
            return True  # the host has booted again, and the old connection is still open
        words = f"dismissed an agent of job {hello.job_uid} that runs on {hello.node}: the agent "
        words += f"of host {hello.host} is connected from {first.node}; give each machine a "
        _LOG.warning(f"{words}name of its own", action="agent_dismissed")
        return False

    async def _listen_to(self, hello: AgentHello, link: ServedLink) -> None:
        key = JobUid(hello.job_uid), hello.host
        self._agents[key] = agent = link, hello
        self._listener.on_connected(hello)
        try:
            while (payloads := await link.receive()) is not None:
                for payload in payloads:
                    message = decode_agent_message(payload)
                    self._listener.on_message(hello, message)
                    if isinstance(message, AgentHeartbeat) and message.sent_at:
                        link.send(encode(HeartbeatHeard(sent_at=message.sent_at)))
        except WireError as error:
            # An agent of another version would reconnect for ever; a new one resumes its job.
            words = f"dismissed the agent of job {hello.job_uid} on {hello.host}: {error}"
            _LOG.warning(words, action="agent_dismissed")
            await _dismiss(link)
        except AuthenticationFailed as error:
            words = f"disconnected the agent of job {hello.job_uid} on {hello.host}: {error}"
            _LOG.warning(words, action="agent_disconnected")
        finally:
            if self._agents.get(key) is agent:
                del self._agents[key]
                self._listener.on_disconnected(hello)


async def _dismiss(link: ServedLink) -> None:
    """Dismiss an agent and let it disconnect first.

    If we closed while it sends, the kernel would reset the connection, and drop the dismissal.
    """
    link.send(encode(Dismiss()))
    async with asyncio.timeout(DISMISSAL_TIMEOUT_SECONDS):
        await _read_to_end(link)


async def _read_to_end(link: ServedLink) -> None:
    """Wait until the other end closes; keep nothing of what it sends."""
    while await link.reader.read(READ_BYTES):
        pass


def _warn(sentence: str) -> None:
    _LOG.warning(sentence, action="not_accepting")
