import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address

import pytest

from coordinator.agents import AgentServer, token_digest, token_fits
from muster.contracts.encoding import decode_coordinator_message, encode
from muster.contracts.framing import FrameReader, frame
from muster.contracts.job import JobUid
from muster.contracts.messages import (
    AgentHello,
    AgentMessage,
    CoordinatorMessage,
    Dismiss,
    Hello,
    RankSaid,
    TerminateRank,
    Welcome,
)
from muster.peers import user_of

HELLO = AgentHello(job_uid="uid", generation=3, token="right")  # noqa: S106  for a test
NEWS = RankSaid(rank=1, incarnation=0, message=Hello())
PATIENCE_SECONDS = 20.0


@dataclass
class Notebook:
    """A listener that writes down what it is told."""

    entries: asyncio.Queue[object] = field(default_factory=asyncio.Queue)

    def expects(self, hello: AgentHello) -> bool:
        return hello == HELLO

    def joined(self, uid: JobUid, generation: int) -> None:
        self.entries.put_nowait(("joined", uid, generation))

    def dropped(self, uid: JobUid, generation: int) -> None:
        self.entries.put_nowait(("dropped", uid, generation))

    def said(self, uid: JobUid, generation: int, message: AgentMessage) -> None:
        self.entries.put_nowait((message, uid, generation))


@dataclass
class Peer:
    """The other end of a connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    frames: FrameReader = field(default_factory=FrameReader)

    def sends(self, *messages: AgentMessage) -> None:
        self.writer.write(b"".join(frame(encode(message)) for message in messages))

    async def hears(self, count: int) -> list[CoordinatorMessage]:
        heard: list[CoordinatorMessage] = []
        while len(heard) < count:
            data = await self.reader.read(1 << 16)
            assert data, "the server hung up"
            heard += map(decode_coordinator_message, self.frames.feed(data))
        return heard

    def sees_whose_process_it_is(self) -> bool:
        ends = [self.writer.get_extra_info(name) for name in ("peername", "sockname")]
        there, here = ((ip_address(host), port) for host, port in ends)
        return user_of(there, here) == os.geteuid()

    async def is_hung_up_on(self) -> list[CoordinatorMessage]:
        return [
            decode_coordinator_message(payload)
            for payload in self.frames.feed(await self.reader.read())
        ]


@dataclass
class Stage:
    server: AgentServer
    notebook: Notebook
    port: int

    async def entry(self) -> object:
        return await self.notebook.entries.get()

    @asynccontextmanager
    async def peer(self) -> AsyncIterator[Peer]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Peer(reader, writer)
        finally:
            writer.close()


def play(story: Callable[[Stage], Awaitable[None]]) -> None:
    """Run a story with a listening server."""

    async def told() -> None:
        notebook = Notebook()
        server = AgentServer(epoch=5, listener=notebook)
        address = await server.start()
        assert address.host == "127.0.0.1"
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await story(Stage(server, notebook, address.port))
        finally:
            await server.stop()

    asyncio.run(told())


def test_an_agent_that_is_expected_is_welcome_and_heard_and_told() -> None:
    async def story(stage: Stage) -> None:
        async with stage.peer() as agent:
            agent.sends(HELLO, NEWS)
            assert await agent.hears(1) == [Welcome(epoch=5)]
            assert await stage.entry() == ("joined", "uid", 3)
            assert await stage.entry() == (NEWS, "uid", 3)
            order = TerminateRank(rank=1, incarnation=0)
            stage.server.send(JobUid("uid"), order)
            await stage.server.flush()
            assert await agent.hears(1) == [order]
        assert await stage.entry() == ("dropped", "uid", 3)
        stage.server.send(JobUid("uid"), order)  # to nobody

    play(story)


@pytest.mark.parametrize(
    "hello",
    [
        AgentHello(job_uid="uid", generation=3, token="wrong"),  # noqa: S106  for a test
        AgentHello(job_uid="uid", generation=2, token="right"),  # noqa: S106  for a test
        AgentHello(job_uid="other", generation=3, token="right"),  # noqa: S106  for a test
    ],
)
def test_any_other_agent_is_told_to_end_what_it_holds(hello: AgentHello) -> None:
    async def story(stage: Stage) -> None:
        async with stage.peer() as stranger:
            stranger.sends(hello, NEWS)
            assert await stranger.hears(2) == [Welcome(epoch=5), Dismiss()]
            # Agents obey only those whose process they can see, and look when they are told.
            assert stranger.sees_whose_process_it_is()
        assert stage.notebook.entries.empty(), "not a word of it is believed"

    play(story)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(b"no message"),
        frame(encode(NEWS)),  # before it has said who it is
        b"\xff" * 8,
    ],
)
def test_whoever_does_not_say_hello_first_is_hung_up_on(words: bytes) -> None:
    async def story(stage: Stage) -> None:
        async with stage.peer() as stranger:
            stranger.writer.write(words)
            assert await stranger.is_hung_up_on() == []
        assert stage.notebook.entries.empty()

    play(story)


def test_an_agent_that_breaks_the_protocol_is_dropped_and_may_come_again() -> None:
    async def story(stage: Stage) -> None:
        async with stage.peer() as agent:
            agent.sends(HELLO)
            await stage.entry()
            agent.writer.write(frame(b"\x00"))
            assert await stage.entry() == ("dropped", "uid", 3)
        async with stage.peer() as agent:
            agent.sends(HELLO)
            assert await stage.entry() == ("joined", "uid", 3)

    play(story)


def test_the_end_of_a_replaced_connection_is_no_drop() -> None:
    async def story(stage: Stage) -> None:
        async with stage.peer() as second:
            async with stage.peer() as first:
                first.sends(HELLO)
                await stage.entry()
                second.sends(HELLO)
                await stage.entry()
            second.sends(NEWS)
            assert await stage.entry() == (NEWS, "uid", 3)
            assert stage.notebook.entries.empty()

    play(story)


def test_a_token_is_kept_as_its_digest() -> None:
    digest = token_digest("right")
    assert "right" not in digest
    assert token_fits("right", digest)
    assert not token_fits("wrong", digest)
    assert not token_fits("", digest)
    assert not token_fits("right", None)
