"""Who is at the other end of a connection within this machine.

Of a Unix socket the kernel says it. Of a loopback connection it can be asked for the owner, and
keeps that of every socket in /proc/net/tcp and tcp6. Only a socket with an inode counts: one whose
process has closed it is shown as root's, and must not be taken for root.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster import sock_diag
from muster.sock_diag import Endpoint, plain

__all__ = ["Endpoint", "Neighbour", "neighbour_of", "plain", "short_address", "user_of"]

_WORD_BYTES: Final = 4

_CLOTHES: Final = f"{'0' * 16}{int.from_bytes(bytes.fromhex('0000FFFF'), sys.byteorder):08X}"
"""Of an IPv4 address among IPv6 ones: ::ffff:0:0/96."""

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
    """Return the user id of the socket at `client` that talks to `server`, None if not known."""
    if sock_diag.is_available():
        with suppress(OSError):  # as where there is no descriptor left to ask with
            return sock_diag.owner_of(client, server)
    return user_in_tables(client, server)


def user_in_tables(client: Endpoint, server: Endpoint, net: Path = Path("/proc/net")) -> int | None:
    """Return the same where the kernel does not answer questions."""
    for table, clothes in (("tcp", ""), ("tcp6", _CLOTHES)):
        # Found as text: a table of thousands of connections is read while everybody waits.
        wanted = f" {_column(client, clothes)} {_column(server, clothes)} "
        for line in _lines_with(wanted, net / table):
            fields = line.split()
            uid, inode = fields[7], fields[9]
            if inode != "0":
                return int(uid)
    return None


def _column(end: Endpoint, clothes: str) -> str:
    """Return address and port as the kernel writes them; `clothes` are those of an IPv4 address."""
    address, port = end
    words = [
        int.from_bytes(address.packed[place : place + _WORD_BYTES], sys.byteorder)
        for place in range(0, len(address.packed), _WORD_BYTES)
    ]
    digits = "".join(f"{word:08X}" for word in words)
    return f"{clothes if len(words) == 1 else ''}{digits}:{port:04X}"


def _lines_with(wanted: str, path: Path) -> Iterator[str]:
    try:
        text = path.read_text()
    except OSError:
        return
    place = text.find(wanted)
    while place >= 0:
        end = text.find("\n", place)
        yield text[text.rfind("\n", 0, place) + 1 : end if end >= 0 else len(text)]
        place = text.find(wanted, place + 1)
