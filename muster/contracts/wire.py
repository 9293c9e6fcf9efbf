"""Messages and exit records as bytes: MessagePack in length-prefixed frames. No socket here.

A frame is an 8-byte little-endian length followed by that many bytes. The owner of a socket feeds
the bytes it read to a `FrameReader` and gets whole payloads back. Each decoder accepts exactly one
direction; anything else is a `WireError`, because the sender is of another version or not ours.
"""

import struct
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from muster.contracts.errors import WireError
from muster.contracts.log_parts import ReceiverMessage, SenderMessage
from muster.contracts.messages import (
    AgentMessage,
    AgentVersion,
    CoordinatorMessage,
    JoinRequest,
    KeyAnswer,
    KeyRequest,
    LogHello,
    RankExited,
    RankMessage,
    RankSaid,
    RankVersion,
    StoreHello,
    WorkerGroup,
)
from muster.contracts.storage import (
    StorageFailed,
    StorageReply,
    StorageRequest,
    StorageWarned,
    StoreAnswer,
    StoreCall,
)

CONTROL_FRAME_LIMIT_BYTES: Final = 1 << 20
"""Control messages are small (an environment is the largest). A longer prefix comes from a broken
or hostile peer, and is refused before anything of that size is allocated."""

Message = TypeVar("Message")

_LENGTH: Final = struct.Struct("<Q")
PREFIX_BYTES: Final = _LENGTH.size


def frame(payload: bytes) -> bytes:
    """Return `payload` behind its length; raises `WireError` if it is too long."""
    if len(payload) > CONTROL_FRAME_LIMIT_BYTES:
        raise WireError(
            f"a message of {len(payload)} bytes is longer than the limit of "
            f"{CONTROL_FRAME_LIMIT_BYTES}"
        )
    return _LENGTH.pack(len(payload)) + payload


def frame_length(prefix: bytes | bytearray, limit_bytes: int) -> int:
    """Return the length in a frame's first `PREFIX_BYTES`; raises `WireError` above the limit."""
    (length,) = _LENGTH.unpack(prefix)
    if length > limit_bytes:
        raise WireError(f"a peer announced a frame of {length} bytes; the limit is {limit_bytes}")
    return int(length)


class FrameReader:
    """Collects bytes in the order they came and returns whole payloads."""

    def __init__(self, limit_bytes: int = CONTROL_FRAME_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes.

        Raises `WireError` for a length above the limit; close the connection then.
        """
        self._buffer += data
        payloads = []
        while len(self._buffer) >= PREFIX_BYTES:
            end = PREFIX_BYTES + frame_length(self._buffer[:PREFIX_BYTES], self._limit_bytes)
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[PREFIX_BYTES:end]))
            del self._buffer[:end]
        return payloads


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of one attempt, written by its agent for a coordinator that was away.

    It holds the same messages that a live connection would have carried, so an end that is only
    known from its record is classified the same way.
    """

    pid: int
    at: str  # RFC 3339, UTC
    said: tuple[RankSaid, ...]
    """The rank's last message of each kind, as far as the agent received them."""
    exited: RankExited


_ENCODER: Final = msgspec.msgpack.Encoder()  # and not JSON, which has no NaN


def encodable(text: str) -> str:
    """Return `text` with lone surrogates replaced, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of one message, without its frame, or of an exit record."""
    return _ENCODER.encode(message)


class _Decode(Generic[Message]):
    """Returns the message in `payload`, or raises `WireError`."""

    def __init__(self, kind: Any, sender: str) -> None:  # noqa: ANN401  a union of messages
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._sender = sender

    def __call__(self, payload: bytes) -> Message:
        try:
            return self._decoder.decode(payload)
        # Invalid UTF-8 and endless nesting raise errors of their own.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"{self._sender} sent an invalid message: {error}") from error


decode_rank_message: Final = _Decode[RankMessage](RankMessage, "a rank")
decode_rank_hello: Final = _Decode[RankVersion](RankVersion, "a rank")
decode_agent_message: Final = _Decode[AgentMessage](AgentMessage, "an agent")
FirstFrame: TypeAlias = AgentVersion | KeyRequest | LogHello | StoreHello | JoinRequest
decode_first_frame: Final = _Decode[FirstFrame](FirstFrame, "an agent")
decode_key_answer: Final = _Decode[KeyAnswer](KeyAnswer, "a coordinator")
decode_coordinator_message: Final = _Decode[CoordinatorMessage](CoordinatorMessage, "a coordinator")
decode_sender_message: Final = _Decode[SenderMessage](SenderMessage, "a sender of logs")
decode_receiver_message: Final = _Decode[ReceiverMessage](ReceiverMessage, "a coordinator")
decode_group: Final = _Decode[WorkerGroup](WorkerGroup, "an agent")
decode_storage_request: Final = _Decode[StorageRequest](StorageRequest, "a rank")
decode_store_call: Final = _Decode[StoreCall](StoreCall, "a storage process")
decode_store_answer: Final = _Decode[StoreAnswer | StorageFailed | StorageWarned](
    StoreAnswer | StorageFailed | StorageWarned, "a coordinator"
)
decode_storage_reply: Final = _Decode[StorageReply](StorageReply, "a storage process")
_decode_record: Final = _Decode[ExitRecord](ExitRecord, "an agent")


def decode_exit_record(content: bytes, pid: int | None) -> ExitRecord | None:
    """Return the exit record of process `pid`; None if it is damaged or of another process.

    With `pid` None, for a process whose start was never reported, any process matches.
    """
    try:
        record = _decode_record(content)
    except WireError:
        return None
    return record if pid in {None, record.pid} else None
