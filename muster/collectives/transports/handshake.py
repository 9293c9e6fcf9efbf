"""Mutual authentication of two ranks by the group's token, as a protocol without I/O.

The caller sends its rank, the rank it wants and a nonce; the answerer adds its own nonce and an
HMAC over both; the caller answers with an HMAC of its own. The token is never sent, and a proof
cannot be replayed. It covers generation, world size and both ranks, so strangers and ranks of an
older group are refused, and so is a connection to the wrong rank.
"""

import hmac
import secrets
import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar

from muster.collectives.errors import PeerRefused

_MAGIC: Final = b"muster\x00\x01"
_HELLO: Final = struct.Struct("<8sQIIIH?16s")
"""Magic, generation, world size, from, to, port, is sealed, nonce."""
_NONCE_BYTES: Final = 16
_PROOF_BYTES: Final = 32

Result = TypeVar("Result")


class Turn(NamedTuple):
    """Bytes to send, and the number of bytes to read afterwards."""

    send: bytes
    size_bytes: int


class Caller(NamedTuple):
    """The rank that connected, its own listening port, and what both said."""

    rank: int
    port: int
    transcript: bytes


Steps: TypeAlias = Generator[Turn, bytes, Result]
"""Yields turns, receives the bytes read, and returns once the other end is authenticated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What both ends must agree on, and this rank."""

    rank: int
    world_size: int
    generation: int
    token: bytes


def call(own: Membership, peer: int, port: int, *, is_sealed: bool) -> Steps[bytes]:
    """The caller's side; `port` is this rank's listening port. Returns what both said.

    Both ends have to see alike whether the connection will be sealed, or a relay could make one of
    them transcript in plain. Raises `PeerRefused`.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hello = _HELLO.pack(
        _MAGIC, own.generation, own.world_size, own.rank, peer, port, is_sealed, nonce
    )
    answer = yield Turn(hello, _NONCE_BYTES + _PROOF_BYTES)
    transcript = hello + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(_proof(own, b"answer", transcript), answer[_NONCE_BYTES:]):
        raise PeerRefused(
            f"rank {peer} has another token than this rank: start all ranks with the same one"
        )
    yield Turn(_proof(own, b"call", transcript), 0)
    return transcript


def answer(own: Membership, *, is_sealed: bool) -> Steps[Caller]:
    """The answerer's side; returns the authenticated caller. Raises `PeerRefused`."""
    hello = yield Turn(b"", _HELLO.size)
    magic, generation, world_size, rank, peer, port, will_seal, _ = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise PeerRefused("a client that is not a rank connected: restrict access to this port")
    if (generation, world_size, peer) != (own.generation, own.world_size, own.rank):
        raise PeerRefused(
            f"a client asked for rank {peer} of {world_size} in generation {generation}; this is "
            f"rank {own.rank} of {own.world_size} in generation {own.generation}: "
            "end the remaining processes of the other group"
        )
    if will_seal != is_sealed:
        raise PeerRefused(
            f"rank {rank} is on another host at one end of its connection and on this host at the "
            "other: there is a relay between them; connect the hosts directly"
        )
    nonce = secrets.token_bytes(_NONCE_BYTES)
    proof = yield Turn(nonce + _proof(own, b"answer", hello + nonce), _PROOF_BYTES)
    if not hmac.compare_digest(_proof(own, b"call", hello + nonce), proof):
        raise PeerRefused(
            "a client connected with another token, or none: start all ranks with the same one"
        )
    return Caller(rank, port, hello + nonce)


def _proof(own: Membership, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(own.token, role + transcript, "sha256")
