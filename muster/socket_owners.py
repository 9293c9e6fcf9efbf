"""Whose TCP socket is this? The kernel is asked for that one socket, over netlink (sock_diag(7)).

The tables in /proc/net hold the same, but to read them is to walk through all sockets there are:
ten milliseconds on a machine that has a few hundred, against one thirtieth of one.
"""

import ipaddress
import socket
import struct
from typing import Final

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Endpoint = tuple[IPAddress, int]

_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_ERROR: Final = 2
_NO_ENTRY: Final = -2
_ANY_STATE: Final = 0xFFFF_FFFF
_ANY_INTERFACE: Final = bytes(4)
_NO_COOKIE: Final = b"\xff" * 8

_HEADER: Final = struct.Struct("=IHHII")
"""Length, type, flags, sequence number, port: nlmsghdr."""

_ASKED: Final = struct.Struct("=BBBBI")
"""Family, protocol, extensions, padding, states: inet_diag_req_v2, which ends with a socket id."""

_PAIR: Final = struct.Struct("!HH16s16s")
"""Ports, then addresses: of the socket itself, of who it is connected to."""

_FOUND: Final = struct.Struct("=B3x36s12x12xII")
"""Family, pair, and behind what is of no use here: uid, inode; inet_diag_msg."""

ANSWER_BYTES: Final = 4096


class OwnersUnknown(Exception):
    """The kernel does not say, or not in this way."""


def owner_of(local: Endpoint, remote: Endpoint) -> int | None:
    """Return the user id of the socket that is bound to `local` and connected to `remote`.

    None: there is none on this machine, or its process has closed it. Raises `OwnersUnknown`.
    """
    is_new = any(isinstance(address, ipaddress.IPv6Address) for address, _ in (local, remote))
    family = socket.AF_INET6 if is_new else socket.AF_INET
    asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE)
    pair = _PAIR.pack(local[1], remote[1], local[0].packed, remote[0].packed)
    answer = _answer(asked + pair + _ANY_INTERFACE + _NO_COOKIE)
    if len(answer) < _HEADER.size + _FOUND.size:
        return None
    family, found, uid, inode = _FOUND.unpack_from(answer, _HEADER.size)
    # Where nothing is connected, the kernel names whoever listens there.
    return uid if inode and _ends(family, found) == (local, remote) else None


def plain(address: str | bytes) -> IPAddress:
    """Return the address; an IPv4 address in IPv6 clothes is IPv4."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def _ends(family: int, pair: bytes) -> tuple[Endpoint, Endpoint]:
    local_port, remote_port, *addresses = _PAIR.unpack(pair)
    size = 4 if family == socket.AF_INET else 16
    local, remote = (plain(address[:size]) for address in addresses)
    return (local, local_port), (remote, remote_port)


def _answer(question: bytes) -> bytes:
    """Return the kernel's answer, empty if there is no such socket."""
    header = _HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.send(header + question)
            answer = kernel.recv(ANSWER_BYTES, socket.MSG_DONTWAIT)  # it was made while we sent
    except (OSError, AttributeError) as error:  # no netlink: another system
        raise OwnersUnknown(str(error)) from error
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _BY_FAMILY:
        return answer
    (code,) = struct.unpack_from("=i", answer, _HEADER.size)
    if kind == _ERROR and code == _NO_ENTRY:
        return b""
    raise OwnersUnknown(f"error {-code}")
