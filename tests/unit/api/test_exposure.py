"""Where a service may listen, as a table."""

import pytest

from api.exposure import Exposed, LockedOut, refuse_exposure, refuse_lockout
from muster.contracts.environ import DoorSettings

TOKEN = {"MUSTER_TOKEN": "t" * 32}
TLS = {"MUSTER_TLS_CERTFILE": "/certificate.pem"}
PLAIN = {"MUSTER_ALLOW_PLAIN_HTTP": "1"}

ELSEWHERE = ["0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "2001:db8::1"]  # noqa: S104  refused


def listen(address: str, environ: dict[str, str], *, is_any_token: bool = False) -> None:
    refuse_exposure("host", address, DoorSettings.read(environ), lambda: is_any_token)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1"])
def test_on_loopback_nothing_is_needed(address: str) -> None:
    listen(address, {})


@pytest.mark.parametrize("address", ELSEWHERE)
def test_elsewhere_a_token_and_a_safe_way_are_needed(address: str) -> None:
    for environ in ({}, TLS, PLAIN, TLS | PLAIN):
        with pytest.raises(Exposed, match="there is no token yet"):
            listen(address, environ)
    for environ, is_any_token in [(TOKEN, False), ({}, True)]:
        with pytest.raises(Exposed, match="in the clear"):
            listen(address, environ, is_any_token=is_any_token)
        listen(address, environ | TLS, is_any_token=is_any_token)
        listen(address, environ | PLAIN, is_any_token=is_any_token)


def test_where_everybody_needs_a_token_there_has_to_be_one() -> None:
    required = {"MUSTER_REQUIRE_TOKEN": "1"}
    with pytest.raises(LockedOut, match="muster token create NAME --scope admin"):
        refuse_lockout(DoorSettings.read(required), lambda: False)
    refuse_lockout(DoorSettings.read({}), lambda: False)
    refuse_lockout(DoorSettings.read(required), lambda: True)
    refuse_lockout(DoorSettings.read(required | TOKEN), lambda: False)
