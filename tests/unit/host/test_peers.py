"""Owners of sockets, of real connections."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from muster.host.peers import Endpoint, is_same_user, normalize_address, uid_of_connection
from tests.support.strangers import STRANGER, needs_root, socket_of

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
        assert uid_of_connection(*pair) == os.getuid()


def test_a_listening_socket_is_not_a_connection(connected: Connected) -> None:
    client, server = (endpoint(one.getsockname()[:2]) for one in connected)
    missing = (client[0], 1)
    assert uid_of_connection(server, missing) is None
    assert uid_of_connection(missing, server) is None


def test_a_closed_socket_has_no_owner(connected: Connected) -> None:
    client, server = (endpoint(one.getsockname()[:2]) for one in connected)
    connected[0].close()
    assert uid_of_connection(client, server) is None


def test_only_connections_of_our_own_user_are_accepted(connected: Connected) -> None:
    client, server = connected
    assert is_same_user(server)
    assert is_same_user(server, or_remote=True)
    client.close()
    assert not is_same_user(server)


@needs_root
def test_another_user_of_this_machine_is_never_taken_for_a_remote_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket_of(STRANGER) as stranger:
        stranger.connect(listener.getsockname())
        with listener.accept()[0] as accepted:
            assert not is_same_user(accepted)
            assert not is_same_user(accepted, or_remote=True)
