"""Who owns one socket, as the kernel says: so the sockets are real ones."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from muster import socket_owners
from muster.socket_owners import Endpoint, OwnersUnknown, owner_of, plain

Connected = tuple[socket.socket, socket.socket]


def end_of(address: tuple[str, int]) -> Endpoint:
    return plain(address[0]), address[1]


@pytest.fixture(
    params=[
        (socket.AF_INET, "127.0.0.1", socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET6, "::1", socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::", socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", socket.AF_INET6, "::ffff:127.0.0.1"),
    ],
    ids=["old", "new", "a new server and an old client", "an old server and a new client"],
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


def test_both_ends_of_a_connection_are_ours(connected: Connected) -> None:
    ends = [end_of(one.getsockname()[:2]) for one in connected]
    assert [owner_of(*ends), owner_of(*ends[::-1])] == [os.getuid()] * 2


def test_a_listener_is_nobody_who_is_connected(connected: Connected) -> None:
    client, server = (end_of(one.getsockname()[:2]) for one in connected)
    nobody = (client[0], 1)
    assert owner_of(server, nobody) is None
    assert owner_of(nobody, server) is None


def test_what_was_closed_belongs_to_nobody(connected: Connected) -> None:
    client, server = (end_of(one.getsockname()[:2]) for one in connected)
    connected[0].close()
    assert owner_of(client, server) is None


def test_a_kernel_that_does_not_know_the_question_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_owners, "_BY_FAMILY", 4711)
    with pytest.raises(OwnersUnknown):
        owner_of(end_of(("127.0.0.1", 1)), end_of(("127.0.0.1", 2)))
