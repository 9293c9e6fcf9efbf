"""A port that nobody listens on, for somebody who will listen in a moment."""

import socket

from muster.contracts.environ import DEFAULT_HOST


def free_port(host: str = DEFAULT_HOST) -> int:
    """Return a port of `host` that is free now.

    It is given back before anybody uses it: somebody else may be faster, so whoever binds it has
    to be ready for a refusal.
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def another_port(than: int, host: str = DEFAULT_HOST) -> int:
    """Return a free port that is not `than`, where somebody may still wait for who is gone."""
    while (port := free_port(host)) == than:
        pass
    return port
