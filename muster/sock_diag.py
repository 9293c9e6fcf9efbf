"""Asks the kernel about one connection of this machine: sock_diag(7), as `ss` does.

The tables in /proc/net tell the same, but take milliseconds to read however few connections there
are, and longer the more there are: too long for a service to do it for everybody who connects.
"""

import ipaddress
import socket
import struct
from collections.abc import Mapping
from functools import cache
from typing import Final

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Endpoint = tuple[IPAddress, int]

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_ANSWER_BYTES: Final = 1 << 12

# struct nlmsghdr, struct inet_diag_req_v2 up to its id, struct inet_diag_sockid, and what follows
# that in struct inet_diag_msg: expires, two queues, uid, inode.
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI")
_PORTS: Final = struct.Struct("!HH")
_REST_OF_ID: Final = struct.Struct("=III")
_STATE: Final = struct.Struct("=BBBB")
_STANDING: Final = struct.Struct("=IIIII")

_INTERNET: Final = {4: socket.AF_INET, 6: socket.AF_INET6}
_LENGTHS: Final[Mapping[int, int]] = {socket.AF_INET: 4, socket.AF_INET6: 16}
_ADDRESS_BYTES: Final = 16
_ID_BYTES: Final = _PORTS.size + 2 * _ADDRESS_BYTES + _REST_OF_ID.size
_ANY_STATE: Final = 0xFFFFFFFF
_NO_COOKIE: Final = 0xFFFFFFFF


@cache
def is_available() -> bool:
    """Whether this kernel answers: some in containers, and those of other systems, do not."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as client,
        ):
            loopback = ipaddress.ip_address("127.0.0.1")
            ours = loopback, client.getsockname()[1]
            return owner_of(ours, (loopback, client.getpeername()[1])) is not None
    except (OSError, AttributeError):
        return False


def owner_of(local: Endpoint, remote: Endpoint) -> int | None:
    """Return the user id of the socket at `local` that talks to `remote`.

    None: there is none, or no process has it any more. Raises OSError where nobody answers.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_question(local, remote))
        return _owner_in(kernel.recv(_ANSWER_BYTES), local, remote)


def _question(local: Endpoint, remote: Endpoint) -> bytes:
    request = _REQUEST.pack(_family(local), socket.IPPROTO_TCP, 0, _ANY_STATE)
    request += _id_of(local, remote)
    length = _HEADER.size + len(request)
    return _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + request


def _owner_in(answer: bytes, local: Endpoint, remote: Endpoint) -> int | None:
    _, kind, _, _, _ = _HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY:
        return None  # an error: there is no such socket
    family, _, _, _ = _STATE.unpack_from(answer, _HEADER.size)
    place = _HEADER.size + _STATE.size
    if _ends_in(answer[place:], family) != (local, remote):
        return None  # nearly such a one: the listener at that address
    _, _, _, uid, inode = _STANDING.unpack_from(answer, place + _ID_BYTES)
    # Without an inode it is one that its process has closed, shown as root's.
    return int(uid) if inode else None


def _ends_in(found: bytes, family: int) -> tuple[Endpoint, Endpoint]:
    ports = _PORTS.unpack_from(found)
    length = _LENGTHS[family]
    places = (_PORTS.size, _PORTS.size + _ADDRESS_BYTES)
    local, remote = (plain(found[place : place + length]) for place in places)
    return (local, ports[0]), (remote, ports[1])


def plain(address: str | bytes) -> IPAddress:
    """Return the address; an IPv4 address in IPv6 clothes is IPv4."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def _id_of(local: Endpoint, remote: Endpoint) -> bytes:
    addresses = [address.packed.ljust(_ADDRESS_BYTES, b"\0") for address, _ in (local, remote)]
    rest = _REST_OF_ID.pack(0, _NO_COOKIE, _NO_COOKIE)
    return _PORTS.pack(local[1], remote[1]) + b"".join(addresses) + rest


def _family(end: Endpoint) -> int:
    """Return the family to ask in; that of IPv4 finds connections in IPv6 clothes as well."""
    return _INTERNET[end[0].version]
