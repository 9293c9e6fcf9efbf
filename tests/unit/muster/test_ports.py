"""Ports that nobody listens on."""

import errno
import os
import socket

import pytest

from muster import ports
from muster.ports import NotHere, NotToBeHad, free_port, is_free

needs_ipv6 = pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")

EVERYWHERE = "0.0.0.0"  # noqa: S104  bound for a moment, and nobody listens


def test_another_port_is_never_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = iter([5000, 5000, 5001])
    monkeypatch.setattr(ports, "free_port", lambda _host: next(offered))
    assert ports.another_port(5000) == 5001


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", EVERYWHERE, pytest.param("::1", marks=needs_ipv6)]
)
def test_a_port_is_free_until_somebody_listens_there(host: str) -> None:
    port = free_port(host)
    assert is_free(host, port)
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address, family=family):
        assert not is_free(host, port)
    assert is_free(host, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no name"])
def test_what_is_no_address_of_this_machine_is_not_called_taken(host: str) -> None:
    for look in (lambda: free_port(host), lambda: is_free(host, 8000)):
        with pytest.raises(NotHere, match=f"cannot listen on {host}.*mend MUSTER_HOST"):
            look()


def test_a_port_that_is_not_ours_to_take_is_not_called_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_socket: socket.socket, _address: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(NotToBeHad, match=r"port 80 .Permission denied.*MUSTER_PORT"):
        is_free("127.0.0.1", 80)
