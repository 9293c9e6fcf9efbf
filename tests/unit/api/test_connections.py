"""Whose connections count, which is closed, and what is refused while it arrives."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from api.access import connections
from api.access.connections import CHUNKS_LIMIT, CONNECTIONS_EACH, LimitedProtocol
from api.access.middleware import AccessMiddleware
from api.access.rate_limits import RateLimiter
from muster.contracts.relay import RelayedClient, relay_line
from tests.unit.api.token_store import TEXT, TokenStore, make_authenticator

pytestmark = pytest.mark.anyio

GET = b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n"
AUTHORIZED = GET + f"Authorization: Bearer {TEXT}\r\n\r\n".encode()
POST = (
    GET.replace(b"GET", b"POST")
    + b"Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n"
)

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def unread(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without a look at the body; a stream lasts as long as its client."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    is_stream = scope["path"] == "/jobs/stream"
    while is_stream and (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.body", "body": b"done"})


@asynccontextmanager
async def served(*, is_own_user: bool = False, may_be_relayed: bool = False) -> AsyncIterator[int]:
    """Serve to callers that all are the service's own user, or a stranger; yield the port."""
    guarded = AccessMiddleware(
        unread,
        authenticator=make_authenticator(TokenStore()),
        limiter=RateLimiter(per_second=1000, at_once=1000, monotonic=lambda: 0.0),
        hosts=[],
        requests=Counter(),
    )
    protocol = partial(
        LimitedProtocol,
        {},
        lambda _user: is_own_user,
        may_be_relayed=may_be_relayed,
        config=Config(guarded, log_config=None),
        server_state=ServerState(),
        app_state={},
    )
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, backlog=1024)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def connected(port: int, sent: bytes = b"") -> AsyncIterator[Client]:
    """Connect and send; with a complete request, read the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        if sent.endswith(b"\r\n\r\n"):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}" if b"content-length" in head else b"0\r\n\r\n")
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def end_of(client: Client) -> bytes:
    """Return what comes before the end of the connection."""
    try:
        return await client[0].read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n"], ids=["silent", "half", "refused"])
async def test_the_oldest_connection_of_a_stranger_is_closed(sent: bytes) -> None:
    async with served() as port, AsyncExitStack() as held:
        first, *others = [
            await held.enter_async_context(connected(port, sent)) for _ in range(CONNECTIONS_EACH)
        ]
        others.append(await held.enter_async_context(connected(port, AUTHORIZED)))
        others.append(await held.enter_async_context(connected(port, sent)))
        await end_of(first)
        assert not any(reader.at_eof() for reader, _ in others)
        reader, writer = others[-2]
        writer.write(AUTHORIZED)
        assert await reader.readuntil(b"\r\n\r\n"), "a token's is not a stranger's"


async def test_requests_that_come_together_are_all_answered() -> None:
    request = AUTHORIZED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with served() as port:
        clients = [
            socket.create_connection(("127.0.0.1", port)) for _ in range(2 * CONNECTIONS_EACH)
        ]
        for client in clients:  # before the server accepts the first one
            client.sendall(request)
        for client in clients:
            reader, writer = await asyncio.open_connection(sock=client)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            await writer.wait_closed()


async def test_a_token_keeps_few_idle_connections_and_its_streams() -> None:
    async with served() as port, AsyncExitStack() as held:
        stream = await held.enter_async_context(connected(port, AUTHORIZED))
        stream[1].write(AUTHORIZED.replace(b"/jobs", b"/jobs/stream"))
        await stream[0].readuntil(b"\r\n\r\n")
        first, *_ = [
            await held.enter_async_context(connected(port, AUTHORIZED))
            for _ in range(CONNECTIONS_EACH + 1)
        ]
        await end_of(first)
        assert not stream[0].at_eof()


async def test_the_own_user_is_never_counted() -> None:
    async with served(is_own_user=True) as port, AsyncExitStack() as held:
        first, *_ = [
            await held.enter_async_context(connected(port)) for _ in range(CONNECTIONS_EACH + 1)
        ]
        await held.enter_async_context(connected(port, GET + b"\r\n"))
        first[1].write(GET + b"\r\n")
        assert await first[0].readuntil(b"\r\n\r\n")


@pytest.mark.parametrize(("may_be_relayed", "status"), [(True, b"401"), (False, b"400")])
async def test_only_a_node_names_its_clients(may_be_relayed: bool, status: bytes) -> None:  # noqa: FBT001
    line = relay_line(RelayedClient(node_id="n-1", host="desk", user=None))
    async with served(may_be_relayed=may_be_relayed) as port, connected(port) as client:
        client[1].write(line + GET + b"\r\n")
        assert (await client[0].readuntil(b"\r\n")).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("sent", [b"", GET], ids=["silent", "half"])
async def test_a_first_request_has_a_deadline(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_SECONDS", 0.01)
    async with served() as port, connected(port, sent) as client:
        await end_of(client)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"1\r\na\r\n" * (CHUNKS_LIMIT + 1), b"413"),
        (b"1\r\na\r\n0\r\n" + b"a:\r\n" * 101 + b"\r\n", b"431"),
        (b"5;a=b\r\n\n\n\n\n\n\r\n" * CHUNKS_LIMIT + b"0\r\na: b\r\n\r\n", b"401"),
        (b"x\r\n" + b"\n" * 1000, b"400"),
    ],
    ids=["many chunks", "many trailers", "within the limits", "no number"],
)
@pytest.mark.parametrize("head", [b"", b"Content-Length: 100000\r\n"], ids=["one", "both"])
async def test_chunks_and_trailers_are_counted(body: bytes, status: bytes, head: bytes) -> None:
    if head and status == b"401":
        status = b"400"  # not only chunks, but a length as well
    async with served() as port, connected(port) as client:
        client[1].write(POST + head + b"\r\n" + body)
        assert (await end_of(client)).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("field", [b"Content-Length: 1", b"Transfer-Encoding: chunked"])
async def test_a_get_has_no_body(field: bytes) -> None:
    async with served(is_own_user=True) as port, connected(port, GET + field) as client:
        client[1].write(b"\r\n\r\n")
        assert (await client[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path", [b"/ui/login", b"/ui/static/a/b"])
async def test_a_change_of_an_open_page_reaches_its_route(path: bytes) -> None:
    request = b"DELETE %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path
    async with served() as port, connected(port) as client:
        client[1].write(request)
        answer = await client[0].readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"x-content-type-options: nosniff\r\n" in answer
        assert b"cache-control: no-store\r\n" in answer
