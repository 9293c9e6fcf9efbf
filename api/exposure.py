"""Whether a service may listen where it was told to.

Loopback is this machine's own. Anywhere else strangers could come, so there must be a token, and
nobody on the way may be able to read it.
"""

import ipaddress
from collections.abc import Callable

from muster.contracts.environ import DoorSettings
from muster.contracts.errors import MusterError


class Exposed(MusterError):
    """The service was asked to listen where other machines could reach it, unprotected."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(
            f"refusing to listen on {host}, where other machines could reach it: {why}"
        )


class LockedOut(MusterError):
    """Everybody was to show a token, and there is none."""

    def __init__(self) -> None:
        super().__init__(
            "refusing to start with MUSTER_REQUIRE_TOKEN, for there is no token and nobody could "
            "make one. Make it with `muster token create NAME --scope admin` while the service "
            "runs without MUSTER_REQUIRE_TOKEN, or set MUSTER_TOKEN"
        )


def refuse_lockout(door: DoorSettings, is_any_token: Callable[[], bool]) -> None:
    """Raise `LockedOut` unless there is somebody who could come in."""
    if door.require_token and door.token_sha256 is None and not is_any_token():
        raise LockedOut


def refuse_exposure(
    host: str, address: str, door: DoorSettings, is_any_token: Callable[[], bool]
) -> None:
    """Raise `Exposed` unless it is safe to listen on `address`, to which `host` resolves."""
    if ipaddress.ip_address(address).is_loopback:
        return
    if door.token_sha256 is None and not is_any_token():
        raise Exposed(
            host,
            "there is no token yet. Make one with `muster token create NAME --scope admin` while "
            "the service runs on 127.0.0.1, or set MUSTER_TOKEN; or leave MUSTER_HOST unset and "
            "use an SSH tunnel",
        )
    if door.tls_certfile is None and not door.allow_plain_http:
        raise Exposed(
            host,
            "tokens would cross the network in the clear. Set MUSTER_TLS_CERTFILE and "
            "MUSTER_TLS_KEYFILE; or MUSTER_ALLOW_PLAIN_HTTP=1 where a proxy in front does TLS",
        )
