"""Messages as bytes and back: MessagePack, each with its tag.

What comes in is of exactly the direction that is asked for, or it is a `WireError`: whoever sends
something else is not one of ours, or not of our version.
"""

from typing import Final

import msgspec

from muster.contracts.errors import WireError
from muster.contracts.messages import AgentMessage, CoordinatorMessage, Layout, RankMessage

_ENCODER: Final = msgspec.msgpack.Encoder()
_RANK: Final[msgspec.msgpack.Decoder[RankMessage]] = msgspec.msgpack.Decoder(RankMessage)
_AGENT: Final[msgspec.msgpack.Decoder[AgentMessage]] = msgspec.msgpack.Decoder(AgentMessage)
_COORDINATOR: Final[msgspec.msgpack.Decoder[CoordinatorMessage]] = msgspec.msgpack.Decoder(
    CoordinatorMessage
)

_LAYOUT: Final = msgspec.msgpack.Decoder(Layout)

_NOT_A_MESSAGE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises: text that is none and nesting without end have errors of their own."""


def speakable(text: str) -> str:
    """Return `text` as a message can carry it: half a surrogate pair is nobody's character."""
    return text.encode("utf-8", "replace").decode()


def encode(message: RankMessage | AgentMessage | CoordinatorMessage | Layout) -> bytes:
    """Return the bytes of one message, without its frame."""
    return _ENCODER.encode(message)


def decode_rank_message(payload: bytes) -> RankMessage:
    """Return what a rank said, or raise `WireError`."""
    try:
        return _RANK.decode(payload)
    except _NOT_A_MESSAGE as error:
        raise WireError(f"a rank sent what is no message: {error}") from error


def decode_agent_message(payload: bytes) -> AgentMessage:
    """Return what an agent said, or raise `WireError`."""
    try:
        return _AGENT.decode(payload)
    except _NOT_A_MESSAGE as error:
        raise WireError(f"an agent sent what is no message: {error}") from error


def decode_coordinator_message(payload: bytes) -> CoordinatorMessage:
    """Return what a coordinator said, or raise `WireError`."""
    try:
        return _COORDINATOR.decode(payload)
    except _NOT_A_MESSAGE as error:
        raise WireError(f"a coordinator sent what is no message: {error}") from error


def decode_layout(payload: bytes) -> Layout:
    """Return the layout that an agent announced, or raise `WireError`."""
    try:
        return _LAYOUT.decode(payload)
    except _NOT_A_MESSAGE as error:
        raise WireError(f"an agent sent what is no message: {error}") from error
