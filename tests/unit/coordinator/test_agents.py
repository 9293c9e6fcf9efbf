import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coordinator.agents.server import AgentServer
from coordinator.service import keep_address_published
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.interpreter import PROTOCOL, VERSION, release
from muster.contracts.job.status import JobUid
from muster.contracts.messages.agent import (
    AgentClaim,
    AgentHello,
    AgentMessage,
    CoordinatorMessage,
    Dismiss,
    RankSaid,
    TerminateRank,
    Welcome,
)
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.messages.logs import LogsDrained
from muster.contracts.messages.rank import Hello
from muster.contracts.messages.wire import decode_coordinator_message, encode
from muster.contracts.settings.paths import LogName
from muster.contracts.token import sha256_of
from muster.host.addresses import publish_address, read_coordinator_address
from muster.host.peers import normalize_address, uid_of_connection
from muster.links.frames import FrameReader, frame
from muster.links.identity import job_identity
from muster.links.serving import listen
from muster.links.session import HELLO_LIMIT_BYTES, Caller, Session
from tests.support.strangers import STRANGER, needs_root, socket_of

HELLO = AgentHello(job_uid="uid", host="beta", agent_number=3, token="right")  # noqa: S106  for a test
ORDER = TerminateRank(rank=1, attempt=0)
NEWS = RankSaid(rank=1, attempt=0, message=Hello())
CLAIM = AgentClaim(job_uid="uid", host="beta", agent_number=3)
LOCAL_CLAIM = AgentClaim(job_uid="uid", host=LOCAL_HOST, agent_number=3)
PATIENCE_SECONDS = 20.0


@dataclass
class Notebook:
    """A listener that collects what it gets."""

    entries: asyncio.Queue[object] = field(default_factory=asyncio.Queue)

    def token_sha256(
        self, claim: AgentHello | AgentClaim, *, is_remote: bool = False
    ) -> str | None:
        hosts = {HELLO.host} if is_remote else {HELLO.host, LOCAL_CLAIM.host}
        known = {(HELLO.job_uid, host, HELLO.agent_number) for host in hosts}
        is_known = (claim.job_uid, claim.host, claim.agent_number) in known
        return sha256_of(HELLO.token) if is_known else None

    def is_expected(self, hello: AgentHello) -> bool:
        return self.token_sha256(hello) == sha256_of(hello.token)

    def coordinator_files(self, _claim: AgentClaim) -> None:
        return None

    def may_send(self, _claim: AgentClaim, _name: LogName) -> bool:
        return False

    def is_draining(self, _uid: JobUid, _host: str) -> bool:
        return False

    def on_drained(self, _claim: AgentClaim, _message: LogsDrained) -> None: ...

    def on_refused(self, uid: JobUid, why: str) -> None:
        self.entries.put_nowait((uid, why))

    def on_connected(self, hello: AgentHello) -> None:
        self.entries.put_nowait(("joined", hello))

    def on_disconnected(self, hello: AgentHello) -> None:
        self.entries.put_nowait(("dropped", hello))

    def on_message(self, hello: AgentHello, message: AgentMessage) -> None:
        self.entries.put_nowait((message, hello))


def caller(claim: AgentClaim = CLAIM, *, is_sealed: bool = False) -> Caller:
    """Return the session of an agent, of this host unless it seals."""
    return Caller(job_identity(encode(claim), sha256_of(HELLO.token)), is_sealed=is_sealed)


def first_words(claim: AgentClaim = CLAIM, *, is_sealed: bool = False) -> bytes:
    """Return what an agent says first, without its frame."""
    [hello] = FrameReader().feed(caller(claim, is_sealed=is_sealed).take())
    return bytes(hello)


@dataclass
class Peer:
    """The other end of a connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    session: Session = field(default_factory=Session)

    def sends(self, *messages: AgentMessage) -> None:
        for message in messages:
            self.session.send(encode(message))
        self.writer.write(self.session.take())

    async def proves_itself(self, claim: AgentClaim = CLAIM, *, is_sealed: bool) -> None:
        """Say what an agent says first."""
        self.session = caller(claim, is_sealed=is_sealed)
        while not self.session.is_open:
            self.writer.write(self.session.take())
            missing = self.session.frames.missing_bytes
            self.session.receive(await self.reader.readexactly(missing))
        self.writer.write(self.session.take())

    def frame_of(self, message: AgentMessage) -> bytes:
        """Return what would be sent, and count it as sent."""
        self.session.send(encode(message))
        return self.session.take()

    async def receives(self, count: int) -> list[CoordinatorMessage]:
        received: list[CoordinatorMessage] = []
        while len(received) < count:
            data = await self.reader.read(1 << 16)
            assert data, "the server hung up"
            received += self._decoded(data)
        return received

    def can_identify_its_peer(self) -> bool:
        """Ask the kernel, as an agent does, whether our user holds the other end."""
        ends = (self.writer.get_extra_info(name) for name in ("peername", "sockname"))
        (host, port), (own_host, own_port) = ends
        return (
            uid_of_connection(
                (normalize_address(host), port), (normalize_address(own_host), own_port)
            )
            == os.geteuid()
        )

    async def is_hung_up_on(self) -> list[CoordinatorMessage]:
        try:
            data = await self.reader.read()
        except ConnectionResetError:  # something was left unread
            data = b""
        return self._decoded(data)

    def _decoded(self, data: bytes) -> list[CoordinatorMessage]:
        return [decode_coordinator_message(it) for it in self.session.receive(data)]


@dataclass
class Stage:
    server: AgentServer
    notebook: Notebook
    port: int
    is_remote: bool

    async def entry(self) -> object:
        return await self.notebook.entries.get()

    @asynccontextmanager
    async def peer(self, user: int = 0) -> AsyncIterator[Peer]:
        """Connect, as another user if one is given."""
        channel = socket_of(user) if user else socket.socket()
        channel.connect(("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=channel)
        try:
            yield Peer(reader, writer)
        finally:
            writer.close()

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Peer]:
        """Connect as an agent with the right token."""
        async with self.peer() as agent:
            await agent.proves_itself(is_sealed=self.is_remote)
            yield agent


def play(story: Callable[[Stage], Awaitable[None]], *, is_remote: bool = False) -> None:
    """Run a story with a listening server: at the port of this host, or at that of others."""

    async def told() -> None:
        notebook = Notebook()
        server = AgentServer(epoch=5, listener=notebook)
        forwarded = listen("127.0.0.1", 0)
        address = await server.start(forwarded)
        assert address.host == "127.0.0.1"
        port = forwarded.getsockname()[1] if is_remote else address.port
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await story(Stage(server, notebook, port, is_remote))
        finally:
            await server.stop()

    asyncio.run(told())


@pytest.mark.parametrize("is_remote", [False, True])
def test_an_expected_agent_can_talk_both_ways(*, is_remote: bool) -> None:
    async def story(stage: Stage) -> None:
        async with stage.agent() as agent:
            agent.sends(HELLO, NEWS)
            assert await agent.receives(1) == [Welcome(epoch=5)]
            assert await stage.entry() == ("joined", HELLO)
            assert await stage.entry() == (NEWS, HELLO)
            stage.server.send(JobUid("uid"), HELLO.host, ORDER)
            await stage.server.flush()
            assert await agent.receives(1) == [ORDER]
        assert await stage.entry() == ("dropped", HELLO)
        stage.server.send(JobUid("uid"), HELLO.host, ORDER)  # without a connection

    play(story, is_remote=is_remote)


@pytest.mark.parametrize(
    "hello",
    [
        AgentHello(job_uid="uid", host="beta", agent_number=3, token="wrong"),  # noqa: S106  for a test
        AgentHello(job_uid="uid", host="beta", agent_number=2, token="right"),  # noqa: S106  for a test
        AgentHello(job_uid="other", host="beta", agent_number=3, token="right"),  # noqa: S106  for a test
    ],
)
def test_any_other_agent_is_dismissed(hello: AgentHello) -> None:
    async def story(stage: Stage) -> None:
        async with stage.agent() as stranger:
            stranger.sends(hello, NEWS)
            assert await stranger.receives(2) == [Welcome(epoch=5), Dismiss()]
            assert stranger.can_identify_its_peer(), "it obeys only a peer it can identify"
        assert stage.notebook.entries.empty(), "it is not believed"

    play(story)


def test_a_dismissed_agent_that_stays_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.agents.server.DISMISSAL_TIMEOUT_SECONDS", 0.0)

    async def story(stage: Stage) -> None:
        async with stage.agent() as stranger:
            stranger.sends(AgentHello(job_uid="other", host="beta", agent_number=3, token="right"))  # noqa: S106
            assert await stranger.is_hung_up_on() == [Welcome(epoch=5), Dismiss()]

    play(story)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(b"no message"),
        frame(encode(HELLO)),  # even with the right token: nothing is proved
        frame(encode(NEWS)),  # before the hello
        b"\xff" * 8,
        frame(encode(msgspec.structs.replace(HELLO, job_uid="x" * HELLO_LIMIT_BYTES))),
        frame(first_words(msgspec.structs.replace(CLAIM, job_uid="other"))),
        frame(first_words(msgspec.structs.replace(CLAIM, agent_number=2))),
        frame(first_words()[:20]),
    ],
    ids=[
        "http",
        "junk",
        "hello",
        "news",
        "length",
        "too long",
        "other job",
        "other agent",
        "cut short",
    ],
)
def test_a_peer_without_a_hello_is_disconnected(words: bytes) -> None:
    async def story(stage: Stage) -> None:
        async with stage.peer() as stranger:
            stranger.writer.write(words)
            assert await stranger.is_hung_up_on() == []
        assert stage.notebook.entries.empty()

    play(story)


@needs_root
def test_another_user_is_disconnected_before_anything_is_read() -> None:
    async def story(stage: Stage) -> None:
        async with stage.peer(STRANGER) as stranger:
            stranger.sends(HELLO)  # even with the right token
            assert await stranger.is_hung_up_on() == []
        assert stage.notebook.entries.empty()

    play(story)


def test_an_agent_of_another_version_is_dismissed() -> None:
    async def story(stage: Stage) -> None:
        async with stage.agent() as agent:
            agent.sends(HELLO)
            await stage.entry()
            agent.writer.write(frame(b"\x00"))
            assert await agent.receives(2) == [Welcome(epoch=5), Dismiss()]
            assert agent.can_identify_its_peer(), "it obeys only a peer it can identify"
        assert await stage.entry() == ("dropped", HELLO)
        async with stage.agent() as agent:
            agent.sends(HELLO)
            assert await stage.entry() == ("joined", HELLO)

    play(story)


@pytest.mark.parametrize(
    ("said", "theirs"),
    [
        ({"version": "0.0.9", "protocol": PROTOCOL}, f"0.0.9 (protocol {PROTOCOL})"),
        ({"version": "9.1.0", "protocol": 99}, "9.1.0 (protocol 99)"),
        ({"version": VERSION}, f"{VERSION} (protocol 0)"),
        ({}, "an older one (protocol 0)"),
    ],
)
def test_an_agent_of_another_muster_is_dismissed(said: dict[str, str | int], theirs: str) -> None:
    known = msgspec.structs.asdict(HELLO)
    del known["version"], known["protocol"]
    hello = known | {"is": "agent_hello", "new": 1} | said

    async def story(stage: Stage) -> None:
        async with stage.agent() as agent:
            agent.writer.write(frame(msgspec.msgpack.encode(hello)))
            assert await agent.receives(2) == [Welcome(epoch=5), Dismiss()]
        uid, why = await stage.entry()
        assert uid == HELLO.job_uid
        assert why == (
            f"dismissed the agent on host beta, which has Muster {theirs}; the coordinator has "
            f"{release()}: upgrade that host"
        )
        assert stage.notebook.entries.empty(), "it is not believed"

    play(story)


def test_a_second_machine_of_a_host_is_dismissed() -> None:
    first, second = (
        msgspec.structs.replace(HELLO, boot_id=name, node=name) for name in ("alpha", "beta")
    )

    async def story(stage: Stage) -> None:
        async with stage.agent() as agent, stage.agent() as other:
            agent.sends(first)
            assert await stage.entry() == ("joined", first)
            with capture_logs() as log:
                other.sends(second)
                assert await other.receives(2) == [Welcome(epoch=5), Dismiss()]
            assert "runs on beta: the agent of host beta is connected from alpha" in log[0]["event"]
            agent.sends(NEWS)
            assert await stage.entry() == (NEWS, first)

    play(story)


@pytest.mark.parametrize(
    "said",
    [encode(HELLO), first_words(), first_words(LOCAL_CLAIM, is_sealed=True)],
    ids=["nothing is proved", "in clear", "an agent of this host"],
)
def test_what_ssh_forwards_has_to_be_sealed(said: bytes) -> None:
    """Any user of the host at its other end may connect there."""

    async def story(stage: Stage) -> None:
        async with stage.peer() as stranger:
            stranger.writer.write(frame(said))
            assert await stranger.is_hung_up_on() == []
        async with stage.agent() as agent:
            agent.sends(HELLO)
            assert await agent.receives(1) == [Welcome(epoch=5)]

    play(story, is_remote=True)


@pytest.mark.parametrize(
    "proof",
    [bytes(32), b"", encode(HELLO), first_words()],
    ids=["zeros", "nothing", "hello", "reflected"],
)
@pytest.mark.parametrize("is_remote", [False, True])
def test_an_agent_without_the_token_is_disconnected(proof: bytes, *, is_remote: bool) -> None:
    async def story(stage: Stage) -> None:
        async with stage.peer() as agent:
            agent.writer.write(frame(first_words(is_sealed=is_remote)))
            answer = await agent.reader.readexactly(64)
            agent.writer.write(frame(proof) + frame(encode(HELLO)))
            assert await agent.reader.read() == b"", answer
        assert stage.notebook.entries.empty()

    play(story, is_remote=is_remote)


@pytest.mark.parametrize("is_remote", [False, True])
def test_an_agent_that_begins_anew_is_disconnected(*, is_remote: bool) -> None:
    async def story(stage: Stage) -> None:
        async with stage.agent() as agent:
            agent.session.send(first_words(is_sealed=is_remote))
            agent.sends(HELLO)
            assert await agent.is_hung_up_on() == []
        assert stage.notebook.entries.empty()

    play(story, is_remote=is_remote)


@pytest.mark.parametrize(
    "deliver",
    [
        lambda one, two: [one, one, two],
        lambda one, two: [two, one],
        lambda _, two: [two],
        lambda one, _: [one[:9] + bytes([one[9] ^ 1]) + one[10:]],
        lambda one, _: [b"\xff" * 8 + one],
        lambda one, _: [frame(one[8:-1])],
        lambda _one, _two: [frame(encode(NEWS))],
    ],
    ids=["repeated", "out of order", "left out", "changed", "length", "cut short", "in clear"],
)
def test_what_the_network_changed_ends_a_sealed_connection(
    deliver: Callable[[bytes, bytes], list[bytes]],
) -> None:
    """It is closed and not dismissed: a changed frame must not end the ranks."""

    async def story(stage: Stage) -> None:
        async with stage.agent() as agent:
            agent.sends(HELLO)
            assert await agent.receives(1) == [Welcome(epoch=5)]
            assert await stage.entry() == ("joined", HELLO)
            one, two = (agent.frame_of(NEWS) for _ in range(2))
            agent.writer.write(b"".join(deliver(one, two)))
            assert await agent.is_hung_up_on() == []
            assert await stage.entry() == ("dropped", HELLO), "nothing after a changed frame counts"

    play(story, is_remote=True)


@pytest.mark.slow
@settings(max_examples=50)
@given(place=st.integers(0, 200), byte=st.integers(0, 255), length=st.integers(0, 200))
def test_no_first_frame_harms_the_server(place: int, byte: int, length: int) -> None:
    words = bytearray(first_words())
    words[place % len(words)] = byte

    async def story(stage: Stage) -> None:
        async with stage.peer() as stranger, stage.agent() as agent:
            stranger.writer.write(frame(bytes(words[: length or None])))
            stranger.writer.write_eof()
            await stranger.reader.read()
            agent.sends(HELLO)
            assert await stage.entry() == ("joined", HELLO)

    play(story)


def test_a_replaced_connection_reports_no_disconnect() -> None:
    async def story(stage: Stage) -> None:
        async with stage.agent() as second:
            async with stage.agent() as first:
                first.sends(HELLO)
                await stage.entry()
                second.sends(HELLO)
                await stage.entry()
            second.sends(NEWS)
            assert await stage.entry() == (NEWS, HELLO)
            assert stage.notebook.entries.empty()

    play(story)


def test_the_address_is_published_until_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.ADDRESS_CHECK_SECONDS", 0.001)
    file = tmp_path / "data" / "address.json"
    file.parent.touch()  # no directory can be created there yet
    ours = CoordinatorAddress(host="here", port=1)
    older = CoordinatorAddress(host="here", port=2)
    is_ours = True
    published: list[Path] = []

    async def holds_lease() -> bool:
        return is_ours

    async def is_published() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while read_coordinator_address(file) != ours:  # noqa: ASYNC110  a file: there is no event
                await asyncio.sleep(0.001)

    async def publish_and_lose() -> None:
        nonlocal is_ours
        publishing = asyncio.ensure_future(
            keep_address_published(ours, file, holds_lease, lambda: published.append(file))
        )
        await asyncio.sleep(0.01)
        file.parent.unlink()
        await is_published()
        file.unlink()
        await is_published()
        publish_address(older, file)
        await is_published()
        is_ours = False
        publish_address(older, file)
        await asyncio.sleep(0.01)
        assert read_coordinator_address(file) == older, "its successor may have written it"
        assert len(published) == 3, "agents are woken after each time"
        publishing.cancel()

    asyncio.run(publish_and_lose())
