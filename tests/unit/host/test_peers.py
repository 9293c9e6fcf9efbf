"""Owners of sockets: from tables as the kernel writes them, and of real connections."""

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from muster.host import peers
from muster.host.peers import (
    Endpoint,
    SocketDiagUnavailable,
    normalize_address,
    uid_from_kernel,
    uid_in_proc_net,
    uid_of_connection,
)

HEADING = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
CLIENT = (ipaddress.ip_address("127.0.0.1"), 0x1234)
SERVER = (ipaddress.ip_address("127.0.0.1"), 8000)


def column(address: str, port: int) -> str:
    packed = ipaddress.ip_address(address).packed
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
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
def test_the_owner_is_read_from_proc_net(
    tmp_path: Path,
    tcp: list[tuple[str, str, int, int]],
    tcp6: list[tuple[str, str, int, int]],
    expected: int | None,
) -> None:
    for name, rows in (("tcp", tcp), ("tcp6", tcp6)):
        text = HEADING + "".join(
            row(column(local, CLIENT[1]), column(remote, SERVER[1]), uid, inode)
            for local, remote, uid, inode in rows
        )
        (tmp_path / name).write_text(text)
    assert uid_in_proc_net(CLIENT, SERVER, tmp_path) == expected


Connected = tuple[socket.socket, socket.socket]


def endpoint(address: tuple[str, int]) -> Endpoint:
    return normalize_address(address[0]), address[1]


@pytest.fixture(
    params=[
        (socket.AF_INET, "127.0.0.1", socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET6, "::1", socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::", socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", socket.AF_INET6, "::ffff:127.0.0.1"),
    ],
    ids=["IPv4", "IPv6", "IPv6 server, IPv4 client", "IPv4 server, IPv6 client"],
)
def connected(request: pytest.FixtureRequest) -> Iterator[Connected]:
    """A client, and the server's end of its connection."""
    server_family, bound, client_family, named = request.param
    with ExitStack() as opened:
        is_dual = server_family != client_family and server_family == socket.AF_INET6
        listener = opened.enter_context(
            socket.create_server((bound, 0), family=server_family, dualstack_ipv6=is_dual)
        )
        client = opened.enter_context(socket.socket(client_family))
        client.connect((named, listener.getsockname()[1]))
        yield client, opened.enter_context(listener.accept()[0])


def test_both_ends_of_a_real_connection_are_ours(connected: Connected) -> None:
    ends = [endpoint(one.getsockname()[:2]) for one in connected]
    for pair in (ends, ends[::-1]):
        assert uid_from_kernel(*pair) == os.getuid()
        assert uid_of_connection(*pair) == uid_in_proc_net(*pair, Path("/proc/net")) == os.getuid()


def test_a_listening_socket_is_not_a_connection(connected: Connected) -> None:
    client, server = (endpoint(one.getsockname()[:2]) for one in connected)
    missing = (client[0], 1)
    assert uid_from_kernel(server, missing) is None
    assert uid_from_kernel(missing, server) is None


def test_a_closed_socket_has_no_owner(connected: Connected) -> None:
    client, server = (endpoint(one.getsockname()[:2]) for one in connected)
    connected[0].close()
    assert uid_from_kernel(client, server) is None


def test_a_kernel_without_sock_diag_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_BY_FAMILY", 4711)
    with pytest.raises(SocketDiagUnavailable):
        uid_from_kernel(endpoint(("127.0.0.1", 1)), endpoint(("127.0.0.1", 2)))
