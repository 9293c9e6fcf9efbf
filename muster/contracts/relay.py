"""By which the API knows who is at the other end of a connection that a node has carried to it.

As in version 1 of the PROXY protocol (HAProxy, proxy-protocol.txt), it is one line before the first
byte of the client. It counts once, at the beginning, and only from a process that could stop the
API as well: so what a client sends is never taken for it.
"""

from typing import Annotated, Final

import msgspec

from muster.contracts.errors import WireError

_PREFIX: Final = b"MUSTER-RELAY "
_END: Final = b"\r\n"

LINE_LIMIT_BYTES: Final = 1024


class RelayedClient(msgspec.Struct, frozen=True, kw_only=True):
    """A client at the relay of a node."""

    node_id: str
    host: str
    """The name of its machine, for people."""
    user: Annotated[str, msgspec.Meta(pattern=r"\Auid:[0-9]{1,10}\Z")] | None
    """The user of that node itself; None for any other."""
    home: str = ""
    """The home directory of that user, of which paths of jobs may be a part."""

    @property
    def name(self) -> str:
        return f"{self.user or 'other'}@{self.host}"


def relay_line(client: RelayedClient) -> bytes:
    """Return the line; JSON escapes a line feed in a name."""
    return _PREFIX + msgspec.json.encode(client) + _END


def split_relay_line(data: bytes) -> tuple[RelayedClient | None, bytes] | None:
    """Return whom the line at the beginning of a connection names, and what follows it.

    No client: there is no such line. None: more has to come. Raises `WireError`.
    """
    if not data.startswith(_PREFIX[: len(data)]):
        return None, data
    line, end, rest = data.partition(_END)
    if len(line) > LINE_LIMIT_BYTES:
        raise WireError(f"a relay has sent a line of more than {LINE_LIMIT_BYTES} bytes")
    if not end:
        return None
    try:
        return msgspec.json.decode(line.removeprefix(_PREFIX), type=RelayedClient), rest
    except msgspec.MsgspecError as error:
        raise WireError(f"a relay has sent an invalid line: {error}") from error
