"""Where the API says that it has written something: an empty datagram, answered by a look."""

import asyncio
from collections.abc import Callable


class Nudges(asyncio.DatagramProtocol):
    """Calls `stir` for every datagram, whatever it holds."""

    def __init__(self, stir: Callable[[], None]) -> None:
        self._stir = stir

    def datagram_received(self, _data: bytes, _address: tuple[str, int]) -> None:
        self._stir()


async def listen(stir: Callable[[], None]) -> tuple[asyncio.DatagramTransport, str]:
    """Listen on a free port of the loopback interface; return the transport and ``host:port``."""
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Nudges(stir), local_addr=("127.0.0.1", 0)
    )
    host, port = transport.get_extra_info("sockname")
    return transport, f"{host}:{port}"
