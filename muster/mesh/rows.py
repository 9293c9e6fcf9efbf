"""Rows of the node that leads, on their way to those that keep copies of them.

The bytes are those of `database.replication` at both ends. Links are sealed.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from muster.contracts.errors import AuthenticationFailed, WireError
from muster.host.peers import short_socket_path
from muster.links.serving import ServedLink
from muster.mesh.calls import CONNECT_SECONDS, Address
from muster.mesh.identity import Claim
from muster.mesh.messages import Rows, encode
from muster.mesh.network import Network
from muster.mesh.streams import open_stream, pump


def serve_rows(network: Network, path: Path, leads: Callable[[], bool]) -> None:
    """Connect other nodes to what sends rows, at a Unix socket, for as long as this one leads.

    A link that ends at once says that there are none.
    """

    async def serve(link: ServedLink, _: Claim, first: Rows) -> None:
        if leads():
            with short_socket_path(path) as address:
                reader, writer = await asyncio.open_unix_connection(address)
            with closing(writer):
                link.send(encode(first))
                await pump(link, reader, writer)

    network.servers[Rows] = serve


def follow_rows(network: Network, address: Address, ours: socket.socket) -> None:
    """Connect `ours`, which is taken over, to what sends rows at an address, until one side ends.

    For other threads than that of the network.
    """

    async def carry() -> None:
        reader, writer = await asyncio.open_connection(sock=ours)
        with closing(writer):
            with suppress(OSError, EOFError, WireError, AuthenticationFailed):
                async with asyncio.timeout(CONNECT_SECONDS):
                    link = await open_stream(address, network.identity, Rows())
                with closing(link.writer):
                    await link.receive_one()
                    await pump(link, reader, writer)
            writer.write_eof()  # its owner has a duplicate

    network.do(lambda: network.run(carry()))
