"""Who is at the other end, read from tables as the kernel writes them."""

import ipaddress
import os
import socket
import sys
from pathlib import Path

import pytest

from muster.peers import user_in_tables, user_of
from muster.socket_owners import plain

HEADING = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
CLIENT = (ipaddress.ip_address("127.0.0.1"), 0x1234)
SERVER = (ipaddress.ip_address("127.0.0.1"), 8000)


def hexed(address: str, port: int) -> str:
    packed = ipaddress.ip_address(address).packed
    words = [packed[place : place + 4] for place in range(0, len(packed), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"


def row(local: str, remote: str, uid: int, inode: int) -> str:
    return f"   0: {local} {remote} 01 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1\n"


@pytest.mark.parametrize(
    ("tcp", "tcp6", "expected"),
    [
        ([("127.0.0.1", "127.0.0.1", 1000, 77)], [], 1000),
        ([], [("::ffff:127.0.0.1", "::ffff:127.0.0.1", 1000, 77)], 1000),
        ([("127.0.0.1", "127.0.0.1", 0, 0)], [], None),
        ([("127.0.0.1", "127.0.0.2", 0, 77)], [], None),
        ([("127.0.0.2", "127.0.0.1", 0, 77)], [], None),
        ([], [], None),
    ],
    ids=["plain", "mapped", "closed, so not root's", "other server", "other client", "none"],
)
def test_the_owner_of_a_socket(
    tmp_path: Path,
    tcp: list[tuple[str, str, int, int]],
    tcp6: list[tuple[str, str, int, int]],
    expected: int | None,
) -> None:
    for name, rows in (("tcp", tcp), ("tcp6", tcp6)):
        text = HEADING + "".join(
            row(hexed(local, CLIENT[1]), hexed(remote, SERVER[1]), uid, inode)
            for local, remote, uid, inode in rows
        )
        (tmp_path / name).write_text(text)
    assert user_in_tables(CLIENT, SERVER, tmp_path) == expected


def test_a_real_connection_is_our_own() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        local, remote = client.getsockname(), client.getpeername()
        ends = (plain(local[0]), local[1]), (plain(remote[0]), remote[1])
        assert user_of(*ends) == user_in_tables(*ends, Path("/proc/net")) == os.getuid()
