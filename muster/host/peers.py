"""Find out who is at the other end of a connection: a process of this machine, or a lost host.

For a Unix socket, SO_PEERCRED tells. For a loopback TCP connection the kernel is asked about that
one socket over netlink (sock_diag(7)), which takes 30 microseconds; /proc/net/tcp lists all sockets
and takes milliseconds.

Only a socket with an inode counts: after its process has closed it, the kernel reports user 0.
"""

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from muster.host.files import closing

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Endpoint = tuple[IPAddress, int]

_CREDENTIALS: Final = struct.Struct("<iII")

_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_ERROR: Final = 2
_ANY_STATE: Final = 0xFFFF_FFFF
_ANY_INTERFACE_NO_COOKIE: Final = bytes(4) + b"\xff" * 8

_HEADER: Final = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence number, port."""
_QUERY: Final = struct.Struct("=BBBBI")
"""inet_diag_req_v2 without its socket id: family, protocol, extensions, padding, states."""
_SOCKET_ID: Final = struct.Struct("!HH16s16s")
"""Local and remote port, local and remote address."""
_FOUND: Final = struct.Struct("=B3x36s12x12xII")
"""inet_diag_msg: family, socket id, uid, inode."""

ANSWER_BYTES: Final = 4096

SEND_TIMEOUT_SECONDS: Final = 10.0
"""Of a connection between an agent and its coordinator: both always read."""

_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Probes after 5 idle seconds, every 2 s, and gives up after three. Options that the system does
not have are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A process of this machine, as it was when it connected or began to listen."""

    pid: int
    user_id: int


def peer_of(channel: socket.socket) -> Peer:
    """Return the process at the other end of a Unix socket; raises OSError if not connected."""
    content = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user_id, _ = _CREDENTIALS.unpack(content)
    return Peer(pid=pid, user_id=user_id)


def name_senders(channel: socket.socket) -> None:
    """Have `receive_from` tell who has sent a packet; what `channel` accepts inherits this."""
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def receive_from(channel: socket.socket, limit_bytes: int) -> tuple[bytes, int]:
    """Return a packet and the pid of its sender; 0 if that is not to be seen from here.

    Unlike `peer_of` this also tells processes apart that have inherited one socket.
    """
    packet, attached, _, _ = channel.recvmsg(limit_bytes, socket.CMSG_SPACE(_CREDENTIALS.size))
    for level, kind, content in attached:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return packet, _CREDENTIALS.unpack(content)[0]
    return packet, 0


@contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """Give an alias of a Unix socket's path, valid in the block: sun_path holds only 108 bytes."""
    with closing(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        yield f"/proc/self/fd/{directory}/{path.name}"


def connect_to_own(path: Path, timeout_seconds: float | None) -> socket.socket:
    """Connect to the Unix socket of a process of our user; raises OSError.

    Another user with write access to the directory could have put a socket there.
    """
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Explicit, as the program may have called socket.setdefaulttimeout().
        channel.settimeout(timeout_seconds)
        with short_socket_path(path) as address:
            channel.connect(address)
        if peer_of(channel).user_id != os.geteuid():
            raise PermissionError
    except OSError:
        channel.close()
        raise
    return channel


def uid_of_connection(client: Endpoint, server: Endpoint) -> int | None:
    """Return the user id of the socket at `client` that is connected to `server`.

    None if this machine has no such socket. Raises OSError if the kernel does not answer.
    """
    is_v6 = any(isinstance(address, ipaddress.IPv6Address) for address, _ in (client, server))
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE)
    query += _SOCKET_ID.pack(client[1], server[1], client[0].packed, server[0].packed)
    query += _ANY_INTERFACE_NO_COOKIE
    header = _HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.send(header + query)
        answer = kernel.recv(ANSWER_BYTES, socket.MSG_DONTWAIT)  # ready when send returns
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        if code == -errno.ENOENT:
            return None
        raise OSError(-code, "the kernel does not answer sock_diag queries")
    if kind != _BY_FAMILY:
        return None
    family, found, uid, inode = _FOUND.unpack_from(answer, _HEADER.size)
    local_port, remote_port, *addresses = _SOCKET_ID.unpack(found)
    size = 4 if family == socket.AF_INET else 16
    at_local, at_remote = (normalize_address(address[:size]) for address in addresses)
    is_same = (at_local, local_port) == client and (at_remote, remote_port) == server
    # Without a connection the kernel reports the socket that listens on the port.
    return uid if inode and is_same else None


def is_same_user(connection: socket.socket, *, or_remote: bool = False) -> bool:
    """Return whether the other end of a TCP connection is a process of this machine and our user.

    `or_remote` also accepts a process of another machine, which must prove by other means who it
    is. False if the other end has closed already, or if the kernel does not answer.
    """
    try:
        ends = connection.getpeername(), connection.getsockname()
        peer, own = ((normalize_address(host), port) for host, port, *_ in ends)
        if or_remote and not (peer[0].is_loopback or peer[0] == own[0]):
            return True
        return uid_of_connection(peer, own) == os.geteuid()
    except OSError:
        return False


def keep_alive(connection: socket.socket, send_timeout_seconds: float | None = None) -> None:
    """Have a TCP connection fail about 10 s after its other host was lost.

    Without a timeout that holds only while nothing is to be sent: a peer may be slow to read.
    """
    if send_timeout_seconds is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(1000 * send_timeout_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@lru_cache(maxsize=256)  # parsing costs microseconds, and the API asks four times for each request
def normalize_address(address: str | bytes) -> IPAddress:
    """Return the address, an IPv4-mapped IPv6 address as IPv4."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found
