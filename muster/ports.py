"""A port that nobody listens on, for somebody who will listen in a moment."""

import errno
import socket

from muster.contracts.environ import DEFAULT_HOST
from muster.contracts.errors import MusterError


class NotHere(MusterError):
    """Nobody can listen there, at whatever port."""

    def __init__(self, host: str, error: OSError) -> None:
        super().__init__(
            f"cannot listen on {host}, which is no address of this machine ({error.strerror}): "
            f"mend MUSTER_HOST, or leave it unset for {DEFAULT_HOST}"
        )


class NotToBeHad(MusterError):
    """Nobody listens there, and we may not either."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        super().__init__(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another with "
            "MUSTER_PORT; those below 1024 are usually root's"
        )


def free_port(host: str = DEFAULT_HOST) -> int:
    """Return a port of `host` that is free now; raises `NotHere`.

    It is given back before anybody uses it: somebody else may be faster, so whoever binds it has
    to be ready for a refusal.
    """
    return _bound(host, 0)


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens at `port` of `host` now; raises `NotHere`, `NotToBeHad`."""
    try:
        _bound(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise NotToBeHad(host, port, error) from error
        return False
    return True


def another_port(than: int, host: str = DEFAULT_HOST) -> int:
    """Return a free port that is not `than`, where somebody may still wait for who is gone."""
    while (port := free_port(host)) == than:
        pass
    return port


def _bound(host: str, port: int) -> int:
    """Return the port that could be taken, and give it back."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NotHere(host, error) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        if port:
            # As whoever listens: what a service before has left behind is no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise NotHere(host, error) from error
            raise
        taken: int = probe.getsockname()[1]
    return taken
