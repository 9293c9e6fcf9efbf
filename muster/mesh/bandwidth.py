"""How fast a link between two nodes is: 2 MB over a connection of its own.

Probes would wait behind them, and so would tensors: nodes measure while both machines are idle.
"""

import asyncio
from contextlib import closing
from typing import Final

from muster.links.identity import Identity
from muster.links.serving import ServedLink, connect
from muster.links.session import Caller
from muster.mesh.calls import Address
from muster.mesh.messages import Bulk, encode

SIZE_BYTES: Final = 2 << 20
PART_BYTES: Final = 1 << 16
LIMIT_SECONDS: Final = 30.0
"""A link slower than 70 KB/s counts as one that is not measured."""


async def measure(address: Address, identity: Identity) -> float:
    """Return the bytes a second to the process at an address.

    Raises OSError (also after `LIMIT_SECONDS`), EOFError, `AuthenticationFailed` and `WireError`.
    """
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(LIMIT_SECONDS):
        link = await connect(address, Caller(identity))
        with closing(link.writer):
            link.send(encode(Bulk()))
            await link.receive_one()  # both ends have proved themselves
            began_at = clock()
            for _ in range(SIZE_BYTES // PART_BYTES):
                link.send(bytes(PART_BYTES))
                await link.writer.drain()
            await link.receive_one()
            return SIZE_BYTES / (clock() - began_at)


async def take(link: ServedLink) -> None:
    """Be the other end of `measure`."""
    missing_bytes = SIZE_BYTES
    async with asyncio.timeout(LIMIT_SECONDS):
        link.send(encode(Bulk()))
        while missing_bytes > 0 and (payloads := await link.receive()) is not None:
            missing_bytes -= sum(map(len, payloads))
        link.send(encode(Bulk()))
        await link.writer.drain()
