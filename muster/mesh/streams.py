"""Bytes over a link between nodes: of an order to a host, and of requests to the API.

The first message of such a link says what it is for; what follows are bytes, both ways.
"""

import asyncio
from typing import Final, Protocol

from muster.links.identity import Identity
from muster.links.serving import ServedLink, connect
from muster.links.session import Caller
from muster.mesh.calls import Address
from muster.mesh.messages import Attach, Relay, Rows, encode

PART_BYTES: Final = 1 << 16


class Stream(Protocol):
    """One connection: a link, or one that is not sealed."""

    writer: asyncio.StreamWriter

    def send(self, payload: bytes) -> None:
        """Send as soon as there is room."""

    async def receive(self) -> list[bytes] | None:
        """Return what has come; None at the end."""


async def open_stream(
    address: Address, identity: Identity, first: Attach | Relay | Rows
) -> ServedLink:
    """Return a link to the node at an address, which has its first message.

    Raises OSError. `AuthenticationFailed` comes with the first bytes that are read.
    """
    link = await connect(address, Caller(identity))
    link.send(encode(first))
    return link


async def pump(link: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes from `reader` over the link, and from the link to `writer`, until one side ends.

    Raises OSError and `AuthenticationFailed`. The caller closes both.
    """

    async def send() -> None:
        while data := await reader.read(PART_BYTES):
            link.send(data)
            await link.writer.drain()

    async def receive() -> None:
        while (payloads := await link.receive()) is not None:
            writer.writelines(payloads)
            await writer.drain()

    both = [asyncio.ensure_future(send()), asyncio.ensure_future(receive())]
    try:
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
