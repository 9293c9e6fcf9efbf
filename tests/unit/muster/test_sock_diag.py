"""The kernel says whose connection it is; nothing else is taken for it."""

import os
import socket
from collections.abc import Iterator

import pytest

from muster import sock_diag
from muster.sock_diag import Endpoint, owner_of, plain

pytestmark = pytest.mark.skipif(
    not sock_diag.is_available(), reason="this kernel does not answer sock_diag"
)


def end(address: tuple[object, ...]) -> Endpoint:
    return plain(str(address[0])), int(str(address[1]))


@pytest.fixture(params=["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def connection(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, Endpoint]]:
    """A client, and where it is connected to."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    everywhere = "::" if "ffff" in request.param else request.param
    dual = family is socket.AF_INET6 and everywhere == "::"
    try:
        listener = socket.create_server((everywhere, 0), family=family, dualstack_ipv6=dual)
    except OSError:
        pytest.skip(f"no {request.param} here")
    with listener, socket.socket(family) as client:
        client.connect((request.param, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            yield client, end(client.getpeername())


def test_a_connection_is_its_users(connection: tuple[socket.socket, Endpoint]) -> None:
    client, server = connection
    assert owner_of(end(client.getsockname()), server) == os.getuid()
    assert owner_of(server, end(client.getsockname())) == os.getuid()


def test_a_closed_connection_is_nobodys(connection: tuple[socket.socket, Endpoint]) -> None:
    client, server = connection
    address = end(client.getsockname())
    client.close()
    assert owner_of(address, server) is None


def test_a_listener_is_no_connection(connection: tuple[socket.socket, Endpoint]) -> None:
    _, server = connection
    assert owner_of(server, (server[0], 1)) is None
