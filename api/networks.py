"""Which addresses are one client: whoever has one address of IPv6 has 2**64 of them."""

from ipaddress import IPv6Address, IPv6Network
from typing import Final

from muster.socket_owners import plain

NETWORK_BITS: Final = 64
"""What one household, or one machine in a data centre, is given of IPv6."""


def client_network(address: str) -> str:
    """Return what stands for `address` wherever clients are counted."""
    found = plain(address)
    if not isinstance(found, IPv6Address) or found.is_loopback:
        return str(found)
    return str(IPv6Network((int(found), NETWORK_BITS), strict=False))
