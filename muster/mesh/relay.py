"""The API at the port of each node: connections go on to the node that leads, over links.

No HTTP is read on the way. Only where there is no API to ask is a request read, and answered with
the reason. What the API learns of a client is in `muster.contracts.relay`.
"""

import asyncio
import html
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from muster.contracts.errors import AuthenticationFailed, WireError
from muster.contracts.location import expand_home
from muster.contracts.relay import RelayedClient, relay_line
from muster.contracts.settings.services import DEFAULT_HOST
from muster.contracts.views.service import ProblemView
from muster.host.peers import is_same_user
from muster.links.serving import ServedLink, accepted
from muster.mesh.calls import CONNECT_SECONDS
from muster.mesh.identity import Claim, Member
from muster.mesh.messages import Relay, encode
from muster.mesh.network import Network
from muster.mesh.streams import PART_BYTES, Stream, open_stream, pump

Target: TypeAlias = Member | int | str

CONNECTIONS_EACH: Final = 128
"""Of this node's user, of all other users of its machine, and of each other node."""

REQUEST_SECONDS: Final = 10.0
"""For the head of a request that is refused."""

REST_SECONDS: Final = 1.0
"""For what follows it: a connection that is closed before it is read loses the answer, too."""

_ERRORS: Final = (
    OSError,
    EOFError,
    WireError,
    AuthenticationFailed,
    asyncio.LimitOverrunError,  # of a long head
)

_ACCEPT: Final = re.compile(rb"^accept:.*text/(html|event-stream)", re.IGNORECASE | re.MULTILINE)


class Unavailable(OSError):
    """There is no API to ask now. Its text says why, and what to do."""


class ApiRelay:
    """Accepts connections to the API, and serves those of other nodes if this one leads."""

    def __init__(
        self, network: Network, listening: socket.socket, target: Callable[[], Target]
    ) -> None:
        """Take over a listening socket of loopback that never blocks.

        `target` returns who leads now: another node, the port of the API of this one, or a sentence
        that says why there is none and what to do. The thread of the network calls it.
        """
        self._network = network
        self._target = target
        self._home = expand_home("~")
        self._open: Counter[str] = Counter()
        network.servers[Relay] = self._serve
        network.do(lambda: network.run(self._accept(listening)))

    async def _accept(self, listening: socket.socket) -> None:
        with closing(listening):
            async for client in accepted(listening, self._network.warn):
                self._network.run(self._carry(client))

    async def _carry(self, client: socket.socket) -> None:
        """Carry a connection of this machine until one side ends it."""
        user = f"uid:{os.geteuid()}" if is_same_user(client) else None
        with suppress(*_ERRORS):
            reader, writer = await asyncio.open_connection(sock=client)
            with closing(writer):
                try:
                    with self._counted(user or "other"):
                        async with asyncio.timeout(CONNECT_SECONDS):
                            stream = await self._connect(user)
                        with closing(stream.writer):
                            await pump(stream, reader, writer)
                except Unavailable as error:
                    await _refuse(reader, writer, str(error))

    async def _connect(self, user: str | None) -> Stream:
        """Return a connection to the API that leads. Raises `Unavailable`."""
        target = self._target()
        if isinstance(target, str):
            raise Unavailable(target)
        if isinstance(target, int):
            own = self._network.own_member
            return await _connect_own(
                target,
                RelayedClient(node_id=own.node_id, host=own.host, user=user, home=self._home),
            )
        try:
            link = await open_stream(
                target.address, self._network.identity, Relay(user=user, home=self._home)
            )
            try:
                await link.receive_one()  # its API is there
            except BaseException:
                link.writer.close()
                raise
        except _ERRORS as error:
            raise Unavailable(
                f"{target.host} leads this cluster, and its API does not answer yet: wait, or see "
                "muster mesh"
            ) from error
        return link

    async def _serve(self, link: ServedLink, claim: Claim, first: Relay) -> None:
        """Be the other end of `_connect`; a link that ends at once says that this node cannot."""
        port = self._target()
        if not isinstance(port, int):
            return
        peer = self._network.peers.get(claim.process_id)
        host = claim.node_id if peer is None else peer.member.host
        client = RelayedClient(node_id=claim.node_id, host=host, user=first.user, home=first.home)
        with self._counted(claim.node_id):
            api = await _connect_own(port, client)
            with closing(api.writer):
                link.send(encode(first))
                await pump(link, api.reader, api.writer)

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        if self._open[name] >= CONNECTIONS_EACH:
            raise Unavailable(f"{name} has {CONNECTIONS_EACH} connections: close some of them")
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1


@dataclass(slots=True)
class _Plain:
    """A connection to the API of this machine, as a `Stream`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, payload: bytes) -> None:
        self.writer.write(payload)

    async def receive(self) -> list[bytes] | None:
        return [data] if (data := await self.reader.read(PART_BYTES)) else None


async def _connect_own(port: int, client: RelayedClient) -> _Plain:
    try:
        reader, writer = await asyncio.open_connection(DEFAULT_HOST, port)
    except OSError as error:
        raise Unavailable("this node leads, and its API is being started: wait") from error
    writer.write(relay_line(client))
    return _Plain(reader, writer)


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, why: str) -> None:
    """Answer the request that comes."""
    async with asyncio.timeout(REQUEST_SECONDS):
        wanted = _ACCEPT.search(await reader.readuntil(b"\r\n\r\n"))
    kind = "application/problem+json"
    body = msgspec.json.encode(
        ProblemView(type="/problems/no-leader", title="No leader", status=503, detail=why)
    )
    if wanted and wanted[1].lower() == b"event-stream":
        return  # a browser repeats a stream that was cut, and not one that was answered
    if wanted:
        kind = "text/html"
        page = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="1">'
        body = (page + html.escape(why)).encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {kind}\r\nRetry-After: 1\r\n"
        f"Cache-Control: no-store\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    writer.write_eof()
    with suppress(TimeoutError):
        async with asyncio.timeout(REST_SECONDS):
            while await reader.read(PART_BYTES):
                pass
