"""Two ranks prove to each other that they know the group's token. No socket in sight.

The caller says who it is, which rank it wants and a nonce; the answerer adds a nonce of its own and
its proof over both; the caller proves itself likewise. The token is never sent, a proof is worth
nothing a second time, and it covers generation, world size and both ranks, so that neither a
stranger nor a rank of yesterday's group gets in, or gets to the wrong one.
"""

import hmac
import secrets
import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar

from muster.collectives.errors import PeerRefused

_MAGIC: Final = b"muster\x00\x01"
_HELLO: Final = struct.Struct("<8sQIIIH16s")  # … generation, world size, from, to, port, nonce
_NONCE_BYTES: Final = 16
_PROOF_BYTES: Final = 32

Result = TypeVar("Result")


class Turn(NamedTuple):
    """What to send, and how many bytes to read thereafter."""

    send: bytes
    size_bytes: int


class Caller(NamedTuple):
    """Who called, and at which port it can be called itself."""

    rank: int
    port: int


Steps: TypeAlias = Generator[Turn, bytes, Result]
"""Yields its turns, is sent what came, and returns when the other end has proved itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What both ends have to agree on, and which of them this one is."""

    rank: int
    world_size: int
    generation: int
    token: bytes


def call(own: Membership, peer: int, port: int) -> Steps[None]:
    """Introduce oneself to `peer`; `port` is where others can call. Raises `PeerRefused`."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hello = _HELLO.pack(_MAGIC, own.generation, own.world_size, own.rank, peer, port, nonce)
    answer = yield Turn(hello, _NONCE_BYTES + _PROOF_BYTES)
    talk = hello + answer[:_NONCE_BYTES]
    _check(own, b"answer", talk, answer[_NONCE_BYTES:])
    yield Turn(_proof(own, b"call", talk), 0)


def answer(own: Membership) -> Steps[Caller]:
    """Return who called, once it has proved itself. Raises `PeerRefused`."""
    hello = yield Turn(b"", _HELLO.size)
    magic, generation, world_size, rank, peer, port, _ = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise PeerRefused("somebody connected who is no rank: keep strangers off this port")
    if (generation, world_size, peer) != (own.generation, own.world_size, own.rank):
        raise PeerRefused(
            f"somebody looks for rank {peer} of {world_size} in generation {generation}; this is "
            f"rank {own.rank} of {own.world_size} in generation {own.generation}: "
            "end whoever is left of another group"
        )
    nonce = secrets.token_bytes(_NONCE_BYTES)
    proof = yield Turn(nonce + _proof(own, b"answer", hello + nonce), _PROOF_BYTES)
    _check(own, b"call", hello + nonce, proof)
    return Caller(rank, port)


def _proof(own: Membership, role: bytes, talk: bytes) -> bytes:
    return hmac.digest(own.token, role + talk, "sha256")


def _check(own: Membership, role: bytes, talk: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(_proof(own, role, talk), proof):
        raise PeerRefused(
            "somebody connected who does not know the group's token: keep strangers off this port"
        )
