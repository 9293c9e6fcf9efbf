import errno
import os
import socket

import pytest

from muster.host import ports
from muster.host.ports import AddressNotLocal, PortUnavailable, free_port, is_port_free

needs_ipv6 = pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")

EVERYWHERE = "0.0.0.0"  # noqa: S104  bound for a moment, without listening


def test_group_port_is_free_and_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        offered = iter([5000, used, 5001])
        monkeypatch.setattr(ports.random, "choice", lambda _ports: next(offered))
        assert ports.group_port(5000) == 5001


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", EVERYWHERE, pytest.param("::1", marks=needs_ipv6)]
)
def test_a_port_is_free_unless_a_server_listens(host: str) -> None:
    port = free_port(host)
    assert is_port_free(host, port)
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address, family=family):
        assert not is_port_free(host, port)
    assert is_port_free(host, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no name"])
def test_a_foreign_address_is_not_reported_as_taken(host: str) -> None:
    for check in (lambda: free_port(host), lambda: is_port_free(host, 8000)):
        with pytest.raises(AddressNotLocal, match=f"cannot listen on {host}.*MUSTER_HOST"):
            check()


def test_a_forbidden_port_is_not_reported_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_socket: socket.socket, _address: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(PortUnavailable, match=r"port 80 .Permission denied.*MUSTER_PORT"):
        is_port_free("127.0.0.1", 80)
