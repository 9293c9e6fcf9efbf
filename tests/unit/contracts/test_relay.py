"""The line before the bytes of a connection that a node has carried."""

import pytest

from muster.contracts.errors import WireError
from muster.contracts.relay import LINE_LIMIT_BYTES, RelayedClient, relay_line, split_relay_line

GET = b"GET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("host", ["desk", "a b\r\nMUSTER-RELAY", "tür"])
@pytest.mark.parametrize("user", ["uid:1000", None])
def test_the_line_is_read_however_it_is_cut(host: str, user: str | None) -> None:
    client = RelayedClient(node_id="n-1", host=host, user=user)
    line = relay_line(client)
    assert all(split_relay_line(line[:end]) is None for end in range(len(line)))
    assert split_relay_line(line + GET) == (client, GET)


def test_a_request_is_no_line() -> None:
    assert split_relay_line(GET) == (None, GET)
    assert split_relay_line(b"MKCOL") == (None, b"MKCOL")


@pytest.mark.parametrize("user", ["root", "uid:", "uid:1\n", " uid:1", "uid:1@desk", "uid:-1"])
def test_another_user_is_refused(user: str) -> None:
    with pytest.raises(WireError):
        split_relay_line(relay_line(RelayedClient(node_id="n-1", host="desk", user=user)))


def test_a_line_without_end_is_refused() -> None:
    line = relay_line(RelayedClient(node_id="n-1", host="x" * LINE_LIMIT_BYTES, user=None))
    with pytest.raises(WireError):
        split_relay_line(line[:-2])
