"""Check and choose TCP ports before another process binds them."""

import errno
import random
import socket
from typing import Final

from muster.contracts.errors import MusterError
from muster.contracts.settings.services import DEFAULT_HOST

GROUP_PORTS: Final = range(20_000, 30_000)
"""Below the ports that Linux gives to outgoing connections (32768 and above): a rank may take ten
seconds to import torch before it binds its port."""


class AddressNotLocal(MusterError):
    """The host is not an address of this machine."""

    def __init__(self, host: str, error: OSError) -> None:
        super().__init__(
            f"cannot listen on {host}, which is not an address of this machine ({error.strerror}): "
            f"correct MUSTER_HOST, or unset it for {DEFAULT_HOST}"
        )


class PortUnavailable(MusterError):
    """The port is not in use, but this user cannot bind it."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        super().__init__(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another port with "
            "MUSTER_PORT; ports below 1024 usually need root"
        )


def free_port(host: str = DEFAULT_HOST) -> int:
    """Return a port of `host` that is free now; raises `AddressNotLocal`.

    Another process may take it before the caller does, so binding it can still fail.
    """
    return _bind_once(host, 0)


def is_port_free(host: str, port: int) -> bool:
    """Return whether `port` of `host` can be bound; raises AddressNotLocal, PortUnavailable."""
    try:
        _bind_once(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise PortUnavailable(host, port, error) from error
        return False
    return True


def group_port(before: int) -> int:
    """Return a free port for a process group; not the one from `before`, still in use perhaps."""
    while (port := random.choice(GROUP_PORTS)) == before or not is_port_free(DEFAULT_HOST, port):  # noqa: S311
        pass
    return port


def _bind_once(host: str, port: int) -> int:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise AddressNotLocal(host, error) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        if port:
            # As servers do: connections in TIME_WAIT do not make a port unavailable.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise AddressNotLocal(host, error) from error
            raise
        bound: int = probe.getsockname()[1]
    return bound
