"""How a process ended, written down by its agent for whoever was away at the time.

It holds word for word what a coordinator would have been told. So an end that only the record
tells of means what it would have meant live: asked to go or done, refused, out of memory.
"""

from typing import Final

import msgspec

from muster.contracts.messages import RankExited, RankSaid


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of one incarnation."""

    pid: int
    at: str
    """RFC 3339, UTC."""
    said: tuple[RankSaid, ...]
    """Its last message of each kind, as far as the agent that saw its end has heard them."""
    exited: RankExited


_ENCODER: Final = msgspec.msgpack.Encoder()  # and not JSON, where a program's NaN has no place
_DECODER: Final[msgspec.msgpack.Decoder[ExitRecord]] = msgspec.msgpack.Decoder(ExitRecord)


def encode_exit_record(record: ExitRecord) -> bytes:
    """Return the content of the file."""
    return _ENCODER.encode(record)


def decode_exit_record(content: bytes, pid: int | None) -> ExitRecord | None:
    """Return what was written down of this process; None for another's, or for no sense.

    Without a `pid`, whose start nobody has heard of, the name of the file must do.
    """
    try:
        record = _DECODER.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return record if pid in {None, record.pid} else None
