"""Groups whose ranks are all connected by sockets, over any network."""

from collections.abc import Sequence
from typing import Final, Self

from muster.collectives.backend import MESSAGE_LIMIT_BYTES, TIMEOUT_SECONDS, OnWait
from muster.collectives.errors import InvalidWorldSize, Unsupported
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.message_backend import MessageBackend
from muster.collectives.transports.rendezvous import (
    Address,
    Connections,
    Endpoint,
    is_loopback,
    rendezvous,
)

LEAST_RANKS: Final = 2

DEFAULT_PORT: Final = 52416
"""Of an address in a list that has none."""


class TcpBackend(MessageBackend):
    """The `Backend` over a socket to each peer."""

    def __init__(
        self,
        own: Membership,
        connections: Connections,
        *,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        on_wait: OnWait = lambda: None,
    ) -> None:
        """Take over the streams of a `rendezvous`."""
        super().__init__(
            own.rank,
            own.world_size,
            connections.streams,
            generation=own.generation,
            limit_bytes=limit_bytes,
            on_wait=on_wait,
        )
        self.hosts = connections.hosts

    @classmethod
    def connect(
        cls,
        address: str,
        rank: int,
        world_size: int,
        *,
        token: str = "",
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Self:
        """Return the backend once all ranks have met at rank 0's ``"host:port"``.

        `token` is a secret that all ranks share; without one, all have to be on this host. Raises
        `InvalidWorldSize` below 2, `InvalidRank`, `Unsupported` without a token that is needed or
        for an invalid address, `Timeout`, `PeerRefused` and `TransportFailed`.
        """
        own = _member(rank, world_size, token)
        parsed = parse_address(address)
        _check_token(own, [parsed])
        return cls(own, rendezvous(own, parsed, timeout_seconds=timeout_seconds))


class RingBackend(TcpBackend):
    """The same for a list of machines: the order of the addresses gives the ranks."""

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        *,
        token: str = "",
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Connect the ranks at `addresses`, each ``"host"`` or ``"host:port"``, all the same list.

        Raises as `TcpBackend.connect` does, and `Unsupported` if an address repeats.
        """
        own, endpoints = listed(addresses, rank, token)
        address = endpoints[0][:2]
        super().__init__(
            own, rendezvous(own, address, endpoints=endpoints, timeout_seconds=timeout_seconds)
        )


def listed(addresses: Sequence[str], rank: int, token: str) -> tuple[Membership, list[Endpoint]]:
    """Return a rank of a list, and where all ranks listen. Raises as `RingBackend` does."""
    own = _member(rank, len(addresses), token)
    parsed = [parse_address(address) for address in addresses]
    if len(set(parsed)) < len(parsed):
        raise Unsupported(f"{', '.join(addresses)} has an address twice: give each rank its own")
    _check_token(own, parsed)
    hosts = list(dict.fromkeys(host for host, _ in parsed))
    return own, [Endpoint(host, port, hosts.index(host)) for host, port in parsed]


def parse_address(text: str) -> Address:
    """Return host and port of ``"host"``, ``"host:port"`` or ``"[v6]:port"``."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # no port, or a bare IPv6 address
        host, port = text, str(DEFAULT_PORT)
    host = host.strip("[]")
    if (
        not host
        or "/" in host
        or host.isdigit()
        or not port.isascii()
        or not port.isdigit()
        or not 0 < int(port) < 1 << 16
    ):
        raise Unsupported(f"{text!r} is not an address: write host:port")
    return host, int(port)


def _member(rank: int, world_size: int, token: str) -> Membership:
    if world_size < LEAST_RANKS:
        raise InvalidWorldSize(world_size, LEAST_RANKS)
    return Membership(rank=rank, world_size=world_size, generation=0, token=(token or "").encode())


def _check_token(own: Membership, addresses: Sequence[Address]) -> None:
    """Refuse before anything listens or connects: without a token, any process could join."""
    if not own.token and not all(_is_local(host) for host, _ in addresses):
        raise Unsupported(
            "ranks of different hosts need a token, the same secret on all ranks: pass token="
        )


def _is_local(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"
