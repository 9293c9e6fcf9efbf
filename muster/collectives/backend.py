"""What a transport promises; everything else is written once against it."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.errors import InvalidRank, SelfMessage, Unsupported
from muster.collectives.tree import Deal

Vector: TypeAlias = NDArray[np.float32]
Data: TypeAlias = bytes | bytearray | memoryview

TIMEOUT_SECONDS: Final = 60.0
"""How long a collective waits where nobody says otherwise."""

MESSAGE_LIMIT_BYTES: Final = 512 << 20
"""A longer length prefix is a corrupt or hostile one, and nothing of that size is allocated."""

Attention: TypeAlias = Callable[[], None]
"""Asks, while one waits, whether something has become more important; raises if so."""

ATTENTION_SECONDS: Final = 0.02
"""How often, at least, that is asked."""


class Backend(Protocol):
    """Messages between the ranks of one group, which never changes: a new one is a new backend.

    Messages of a pair arrive whole, once and in the order they were sent. Different pairs may be
    used from different threads. Every call raises a `CollectiveError`; after `TimedOut` and
    `SizeMismatch` the backend is as before the call, and a message that began to move goes on with
    the next one.

    A peer that died is noticed at once, whoever is waited for. One that closed is noticed by whom
    it owes something, after all that it had sent: a rank that is done with the group may go while
    others still finish. Both are `ChannelClosed`.
    """

    @property
    def rank(self) -> int:
        """Its own place in the group."""

    @property
    def world_size(self) -> int:
        """How many are in the group."""

    def send(self, peer: int, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Return when `data` may be changed again; it may not have arrived yet.

        Two ranks may send to each other at the same time, however much; a circle of more than two
        has to `exchange`. A message that timed out half sent still arrives, and is not to be sent
        again.
        """

    def receive(
        self, peer: int, size_bytes: int, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> bytearray:
        """Return the next message of `peer`, which has to be of that size.

        A message of another size is `SizeMismatch`, and stays to be received.
        """

    def receive_into(
        self, peer: int, target: memoryview, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Fill `target`, contiguous, with the next message of `peer`; as `receive`, uncopied."""

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, memoryview]],
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Send all of `outgoing` and fill all of `incoming`, each pair's in the order given.

        Both go on side by side, so whatever all ranks exchange goes through, however much it is.
        After `TimedOut` or `SizeMismatch` nobody knows what has come: leave the group.
        """

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Return when every rank of the group has called it."""

    def close(self) -> None:
        """Give everything back. May be called twice; not while another call is under way."""


def check_peer(peer: int, rank: int, world_size: int) -> None:
    """Raise `InvalidRank` or `SelfMessage` unless `rank` can talk to `peer`."""
    if not 0 <= peer < world_size:
        raise InvalidRank(peer, world_size)
    if peer == rank:
        raise SelfMessage(rank)


def check_length(size_bytes: int, limit_bytes: int) -> None:
    """Raise `Unsupported` for a message that the other end would refuse."""
    if size_bytes > limit_bytes:
        raise Unsupported(
            f"a message of {size_bytes} bytes is longer than the limit of {limit_bytes}: "
            "send it in parts"
        )


class Reducer(Protocol):
    """Sums vectors by the fixed tree, in memory that the transport owns.

    A rank writes the sum of each of its blocks into a slot and calls `all_reduce`. The bits of the
    result depend on the leaves alone, never on who had which block.
    """

    @property
    def slots(self) -> NDArray[np.float32]:
        """(slot count, elements) float32; to be written to while no `all_reduce` is under way."""

    def all_reduce(self, deal: Deal, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Vector:
        """Return the root's sum, (elements,), to be read until the next call.

        `deal` says which blocks each rank holds, the same on every rank; together they are all
        leaves, once. Slot i of this rank holds its block i. A NaN comes out as 0x7fc00000.
        After any error the group is to be left: who has which part of the sum is not known.
        """
