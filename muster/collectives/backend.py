"""What a transport promises; everything else is written once against it."""

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.tree import Block

Vector: TypeAlias = NDArray[np.float32]
Data: TypeAlias = bytes | bytearray | memoryview

TIMEOUT_SECONDS: Final = 60.0
"""How long a collective waits where nobody says otherwise."""

MESSAGE_LIMIT_BYTES: Final = 512 << 20
"""A longer length prefix is a corrupt or hostile one, and nothing of that size is allocated."""


class Backend(Protocol):
    """Messages between the ranks of one group, which never changes: a new one is a new backend.

    Messages of a pair arrive whole, once and in the order they were sent. Different pairs may be
    used from different threads. Every call raises a `CollectiveError`; after `TimedOut` the
    backend is as before the call. A peer that is gone is noticed at once, as `ChannelClosed`.
    """

    @property
    def rank(self) -> int:
        """Its own place in the group."""

    @property
    def world_size(self) -> int:
        """How many are in the group."""

    def send(self, peer: int, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Return when `data` may be changed again; it may not have arrived yet."""

    def receive(
        self, peer: int, size_bytes: int, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> bytearray:
        """Return the next message of `peer`, which has to be of that size: else `SizeMismatch`."""

    def receive_into(
        self, peer: int, target: memoryview, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Fill `target` with the next message of `peer`; as `receive`, without a copy."""

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Return when every rank of the group has called it."""

    def close(self) -> None:
        """Give everything back; peers see `ChannelClosed`. May be called twice."""


class Reducer(Protocol):
    """Sums vectors by the fixed tree, in memory that the transport owns.

    A rank writes the sum of each of its blocks into a slot and calls `all_reduce`. The bits of the
    result depend on the leaves alone, never on who had which block.
    """

    @property
    def slots(self) -> NDArray[np.float32]:
        """(slot count, elements) float32; to be written to while no `all_reduce` is under way."""

    def all_reduce(
        self, layout: Sequence[Sequence[Block]], *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Vector:
        """Return the root's sum, (elements,), to be read until the next call.

        `layout` says which blocks each rank holds, the same on every rank; together they are all
        leaves, once. Slot i of this rank holds its block i. A NaN comes out as 0x7fc00000.
        """
