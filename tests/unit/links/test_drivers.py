"""Each style of I/O at one end of a real connection, and an event loop at the other."""

import asyncio
import fcntl
import resource
import selectors
import socket
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from muster.links.blocking import BlockingLink
from muster.links.frames import FrameReader, frame
from muster.links.identity import Identity, Kind
from muster.links.selecting import SelectingLink
from muster.links.serving import PENDING_LIMIT, LinkServer, ServedLink, listen
from muster.links.session import Answerer, Caller, ProtocolDiffers, Session

IDENTITY = Identity(Kind.JOB, b"a claim", b"a secret")
PAYLOADS = [b"first", b"", b"x" * 300_000]
PATIENCE_SECONDS = 20.0


async def echo(link: ServedLink, payload: bytes) -> None:
    """Send everything back."""
    link.send(payload)
    while (payloads := await link.receive()) is not None:
        for each in payloads:
            link.send(each)


async def echo_in_a_thread(link: ServedLink, payload: bytes) -> None:
    """Send everything back to an end that waits for each payload."""
    link.send(payload)
    await link.writer.drain()
    with closing(link.detach()) as blocking:
        for _ in PAYLOADS[1:]:
            await asyncio.to_thread(lambda: blocking.send(blocking.receive()))


Serve = Callable[[ServedLink, bytes], Coroutine[None, None, None]]


@contextmanager
def server(warned: list[str], serve_link: Serve = echo) -> Iterator[tuple[str, int]]:
    """Serve in a thread; what it warns of is in `warned` after that."""
    listening = listen("127.0.0.1", 0)

    async def serve() -> None:
        links = LinkServer(lambda _: Answerer(lambda _: IDENTITY), serve_link, warned.append)
        links.accept(listening, is_remote=True)
        await stopped.wait()
        await links.stop()

    stopped = asyncio.Event()
    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor(1) as threads, closing(loop):
        serving = threads.submit(loop.run_until_complete, serve())
        try:
            yield listening.getsockname()
        finally:
            loop.call_soon_threadsafe(stopped.set)
            serving.result()


def from_a_thread(address: tuple[str, int], payloads: list[bytes]) -> list[bytes]:
    with closing(BlockingLink(socket.create_connection(address), Caller(IDENTITY))) as link:
        link.open()
        got = []
        for payload in payloads:
            link.send(payload)
            got.append(link.receive())
        return got


def from_a_selector(address: tuple[str, int], payloads: list[bytes]) -> list[bytes]:
    got: list[bytes] = []
    ended: list[Exception | None] = []
    with selectors.DefaultSelector() as selector:
        link = SelectingLink(address, Caller(IDENTITY), selector, bytes, got.append, ended.append)
        for payload in payloads:  # before the link is open
            link.send(payload)
        while len(got) < len(payloads) and not ended:
            ready = selector.select(PATIENCE_SECONDS)
            assert ready, "nothing is ready"
            for key, _ in ready:
                key.data()
        link.close()
    if ended[0] is not None:
        raise ended[0]
    return got


Talk = Callable[[tuple[str, int], list[bytes]], list[bytes]]


@pytest.mark.parametrize(
    ("serve", "talk"),
    [(echo, from_a_thread), (echo, from_a_selector), (echo_in_a_thread, from_a_thread)],
)
def test_payloads_of_any_driver_come_back(serve: Serve, talk: Talk) -> None:
    with server(warned := [], serve) as address:
        assert talk(address, PAYLOADS) == PAYLOADS
    assert warned == []


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_link_of_a_high_descriptor_has_news() -> None:
    own, other = socket.socketpair()
    with own, other:
        high = socket.socket(fileno=fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, 1024))
        with closing(BlockingLink(high, Session())) as link:
            assert not link.has_news(0.0)
            other.sendall(frame(b"news"))
            assert link.has_news(PATIENCE_SECONDS)


def test_no_more_than_the_limit_stay_of_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.links.serving.HELLO_TIMEOUT_SECONDS", 3600.0)

    async def story(stack: ExitStack) -> None:
        listening = listen("127.0.0.1", 0)
        links = LinkServer(lambda _: Answerer(lambda _: IDENTITY), echo, print)
        silent = [
            stack.enter_context(socket.create_connection(listening.getsockname()))
            for _ in range(2 * PENDING_LIMIT)
        ]
        links.accept(listening, is_remote=True)  # all at once
        loop = asyncio.get_running_loop()
        for each in silent:
            each.setblocking(False)  # noqa: FBT003  the standard library's signature
        async with asyncio.timeout(PATIENCE_SECONDS):
            for each in silent[:PENDING_LIMIT]:
                assert await loop.sock_recv(each, 1) == b"", "the oldest are closed"
        for each in silent[PENDING_LIMIT:]:
            with pytest.raises(BlockingIOError):
                each.recv(1)
        await links.stop()

    with ExitStack() as stack:
        asyncio.run(story(stack))


def test_a_cancelled_server_loses_no_connection() -> None:
    async def story() -> None:
        with listen("127.0.0.1", 0) as listening:
            links = LinkServer(lambda _: Answerer(lambda _: IDENTITY), echo, print)
            accepting = links.accept(listening, is_remote=True)
            await asyncio.sleep(0)
            with socket.create_connection(listening.getsockname()):
                for _ in range(2):  # the loop has seen it, the server not yet
                    await asyncio.sleep(0)
                accepting.cancel()
                await asyncio.wait([accepting])
                listening.accept()[0].close()
            await links.stop()

    asyncio.run(story())


OTHER = frame(b"muster\0\x09")
"""What both ends of another protocol begin with, however they go on."""


@pytest.mark.parametrize("talk", [from_a_thread, from_a_selector])
def test_a_caller_says_that_the_protocol_differs(talk: Talk) -> None:
    with listen("127.0.0.1", 0) as other, ThreadPoolExecutor(1) as threads:
        other.settimeout(PATIENCE_SECONDS)
        talking = threads.submit(talk, other.getsockname(), PAYLOADS)
        connection, _ = other.accept()
        with connection:
            connection.sendall(OTHER)
            with pytest.raises(ProtocolDiffers, match="of protocol 9, this one of protocol 1: "):
                talking.result()


def test_a_server_says_once_that_the_protocol_differs() -> None:
    with server(warned := []) as address:
        for _ in range(2):
            with socket.create_connection(address) as other:
                other.sendall(OTHER)
                assert FrameReader().feed(other.recv(64)) == [b"muster\0\1"]
                assert other.recv(1) == b""
    [said] = warned
    assert "has links of protocol 9, this one of protocol 1: install the same Muster" in said
