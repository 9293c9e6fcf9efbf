"""Messages and exit records as bytes: MessagePack.

Each decoder accepts exactly one direction; anything else is a `WireError`, because the sender is of
another version or not ours. Between hosts and to the coordinator the bytes are payloads of a link
(`muster.links`).
"""

from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from muster.contracts.errors import WireError
from muster.contracts.messages.agent import (
    AgentClaim,
    AgentMessage,
    AgentVersion,
    CoordinatorMessage,
    JoinRequest,
    LogHello,
    RankExited,
    RankSaid,
    StoreHello,
)
from muster.contracts.messages.logs import ReceiverMessage, SenderMessage
from muster.contracts.messages.rank import RankMessage, RankVersion, WorkerGroup
from muster.contracts.messages.storage import (
    StorageFailed,
    StorageReply,
    StorageRequest,
    StorageWarned,
    StoreAnswer,
    StoreCall,
)

Message = TypeVar("Message")


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
FirstFrame: TypeAlias = AgentVersion | LogHello | StoreHello | JoinRequest
decode_first_frame: Final = _Decode[FirstFrame](FirstFrame, "an agent")
decode_agent_claim: Final = _Decode[AgentClaim](AgentClaim, "an agent")
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
