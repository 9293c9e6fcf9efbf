"""Who is at the other end of a connection within this machine.

Of a Unix socket the kernel says it. Of a loopback connection it is asked for the owner of the
other socket; where it does not answer that, all owners are in /proc/net/tcp and tcp6. Only a socket
with an inode counts: one whose process has closed it is shown as root's, and must not be taken for
root.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.socket_owners import Endpoint, OwnersUnknown, owner_of, plain

_HEX_DIGITS_PER_WORD: Final = 8

_CREDENTIALS: Final = struct.Struct("<iII")


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A process of this machine, as it was when it connected or began to listen."""

    pid: int
    user_id: int


def neighbour_of(channel: socket.socket) -> Neighbour:
    """Return who is at the other end of a Unix socket; raises OSError if it is not connected."""
    content = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user_id, _ = _CREDENTIALS.unpack(content)
    return Neighbour(pid=pid, user_id=user_id)


@contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Give the address of a Unix socket, valid inside: a path as such may be too long for one."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def user_of(client: Endpoint, server: Endpoint) -> int | None:
    """Return the user id of the socket at `client` that talks to `server`, None if not known.

    Raises OSError where it is known and cannot be read now, for want of descriptors.
    """
    try:
        return owner_of(client, server)
    except OwnersUnknown:
        return user_in_tables(client, server, Path("/proc/net"))


def user_in_tables(client: Endpoint, server: Endpoint, net: Path) -> int | None:
    """Return the same as `user_of`, from the tables of all sockets."""
    for table in ("tcp", "tcp6"):
        for line in _lines(net / table):
            fields = line.split()
            local, remote, uid, inode = fields[1], fields[2], fields[7], fields[9]
            if inode != "0" and endpoint(local) == client and endpoint(remote) == server:
                return int(uid)
    return None


def endpoint(text: str) -> Endpoint:
    """Return address and port of one column; an IPv4 address in IPv6 clothes is IPv4."""
    address, _, port = text.partition(":")
    words = [
        int(address[place : place + _HEX_DIGITS_PER_WORD], 16).to_bytes(4, sys.byteorder)
        for place in range(0, len(address), _HEX_DIGITS_PER_WORD)
    ]
    return plain(b"".join(words)), int(port, 16)


def _lines(path: Path) -> Iterator[str]:
    try:
        text = path.read_text()
    except (FileNotFoundError, PermissionError):
        return  # another system, or a container that hides them
    yield from text.splitlines()[1:]
