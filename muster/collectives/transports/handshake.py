"""What two ranks prove to each other by their group's token, as sessions of a link. No I/O.

The caller says in clear which rank it is, which rank it wants, and of which group. Strangers and
ranks of an older group are refused, and so is a connection to the wrong rank.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from muster.collectives.errors import PeerRefused
from muster.links.identity import Identity, Kind
from muster.links.session import Answerer, Caller, Session

_CLAIM: Final = struct.Struct("<QIIIH32s")
"""Generation, world size, from, to, port, SHA-256 of the hosts."""


class CallingRank(NamedTuple):
    """The rank that connected, and its own listening port."""

    rank: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What both ends must agree on, and this rank."""

    rank: int
    world_size: int
    generation: int
    token: bytes
    hosts: tuple[int, ...] = ()
    """The number of each rank's host; empty until rank 0 has said it. Who sums with whom follows
    from it."""

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(repr(self.hosts).encode()).digest()


def call(own: Membership, peer: int, port: int, *, is_sealed: bool) -> Caller:
    """Return the caller's side; `port` is this rank's listening port."""
    claim = _CLAIM.pack(own.generation, own.world_size, own.rank, peer, port, own.digest)
    return Caller(Identity(Kind.GROUP, claim, own.token), is_sealed=is_sealed)


def answer(own: Membership, *, is_sealed: bool) -> Answerer:
    """Return the answerer's side, which raises `PeerRefused` for another group or rank."""

    def find(claim: bytes) -> Identity:
        if len(claim) != _CLAIM.size:
            raise PeerRefused("a client that is not a rank connected: restrict access to this port")
        generation, world_size, rank, peer, _, digest = _CLAIM.unpack(claim)
        if (generation, world_size, peer) != (own.generation, own.world_size, own.rank):
            raise PeerRefused(
                f"a client asked for rank {peer} of {world_size} in generation {generation}; this "
                f"is rank {own.rank} of {own.world_size} in generation {own.generation}: "
                "end the remaining processes of the other group"
            )
        if digest != own.digest:
            raise PeerRefused(
                f"ranks {rank} and {peer} were given different addresses of the ranks: give all "
                "ranks the same list, each address written alike"
            )
        return Identity(Kind.GROUP, claim, own.token)

    return Answerer(find, is_sealed=is_sealed)


def caller_of(session: Session) -> CallingRank:
    """Return who has called, once the session is open."""
    _, _, rank, _, port, _ = _CLAIM.unpack(session.claim)
    return CallingRank(rank, port)
