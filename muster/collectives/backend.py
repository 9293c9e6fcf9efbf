"""The interface of a transport, all-gather over any of them, and the interface of a reducer."""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.deadline import Deadline
from muster.collectives.tree import BlockAssignment

Vector: TypeAlias = NDArray[np.float32]
Data: TypeAlias = bytes | bytearray | memoryview

TIMEOUT_SECONDS: Final = 60.0
"""Default timeout of a collective."""

MESSAGE_LIMIT_BYTES: Final = 512 << 20
"""A longer length prefix is corrupt or hostile; nothing of that size is allocated."""

GATHERED_BYTES: Final = 64 << 20
"""`all_gather` splits larger data into messages well below the receiver's length limit."""

OnWait: TypeAlias = Callable[[], None]
"""Called while a call waits; what it raises ends the wait."""

ON_WAIT_SECONDS: Final = 0.02
"""The longest time between two such calls."""

_SIZE: Final = struct.Struct("<Q")


class Backend(Protocol):
    """Messages between the ranks of one fixed group; a new group needs a new backend.

    Messages of a pair arrive whole, once and in the order they were sent. Different pairs may be
    used from different threads. Every call may raise a `CollectiveError`. After `TimedOut` and
    `SizeMismatch` the backend is as before the call; a message that was partly sent continues with
    the next call. A peer that cannot be, and a message above the limit, raise ValueError.

    The death of any peer ends every wait at once: a socket raises `ChannelClosed`, and in shared
    memory what `on_wait` raises. A peer that closed raises it only in calls that still need that
    peer, after everything it had sent was received: a rank that has finished may leave while others
    still work.
    """

    rank: int
    """The position of this rank in the group."""
    world_size: int

    def send(self, peer: int, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Send `data`, and return when it may be modified; it may not have arrived yet.

        Two ranks may send to each other at the same time, any amount. A cycle of more than two
        ranks needs `exchange`. A message that timed out half sent still arrives: do not repeat it.
        """

    def receive(
        self, peer: int, size_bytes: int, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> bytearray:
        """Return the next message of `peer`, which must have `size_bytes`.

        A message of another size raises `SizeMismatch` and can still be received.
        """
        message = bytearray(size_bytes)
        self.receive_into(peer, memoryview(message), timeout_seconds=timeout_seconds)
        return message

    def receive_into(
        self, peer: int, target: memoryview, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Fill the contiguous `target` with the next message of `peer`, without a copy."""

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, memoryview]],
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Send all of `outgoing` and fill all of `incoming`, in the given order for each peer.

        Sending and receiving overlap, so an exchange among all ranks cannot deadlock. After
        `TimedOut` or `SizeMismatch` it is unknown what has arrived: leave the group.
        """

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Return when every rank of the group has called this."""

    def close(self) -> None:
        """Release all resources. May be called twice, but not during another call."""


def check_peer(peer: int, rank: int, world_size: int) -> None:
    """Raise ValueError unless `rank` can talk to `peer`."""
    if peer == rank or not 0 <= peer < world_size:
        raise ValueError(f"rank {rank} of {world_size} has no peer {peer}")


def check_length(size_bytes: int, limit_bytes: int) -> None:
    """Raise ValueError for a message longer than the receiver accepts."""
    if size_bytes > limit_bytes:
        raise ValueError(
            f"a message of {size_bytes} bytes is longer than the limit of {limit_bytes}: "
            "send it in parts"
        )


def all_gather(
    backend: Backend, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Data]:
    """Return the data of every rank, in rank order; sizes may differ."""
    deadline = Deadline(timeout_seconds, "an all-gather")
    own = _SIZE.pack(memoryview(data).nbytes)
    sizes = _all_to_all(backend, own, [_SIZE.size] * backend.world_size, deadline)
    return _all_to_all(backend, data, [_SIZE.unpack(size)[0] for size in sizes], deadline)


def _all_to_all(
    backend: Backend, data: Data, sizes: Sequence[int], deadline: Deadline
) -> list[Data]:
    peers = [rank for rank in range(backend.world_size) if rank != backend.rank]
    gathered: dict[int, Data] = {peer: bytearray(sizes[peer]) for peer in peers}
    backend.exchange(
        [(peer, part) for peer in peers for part in _cut(data)],
        [(peer, part) for peer in peers for part in _cut(gathered[peer])],
        timeout_seconds=deadline.left_seconds,
    )
    gathered[backend.rank] = data
    return [gathered[rank] for rank in range(backend.world_size)]


def _cut(data: Data) -> Iterator[memoryview]:
    flat = memoryview(data).cast("B")
    for start in range(0, flat.nbytes, GATHERED_BYTES):
        yield flat[start : start + GATHERED_BYTES]


class Reducer(Protocol):
    """Sums vectors in the order of the fixed tree, in memory that the transport owns.

    A rank writes the sum of each of its blocks into a slot and calls `all_reduce`. The bits of the
    result depend on the leaves alone, not on which rank had which block.
    """

    slots: NDArray[np.float32]
    """(slot count, elements); writable outside of `all_reduce`."""

    def all_reduce(
        self, assignment: BlockAssignment, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Vector:
        """Return the root's sum, (elements,), valid until the next call.

        `assignment` gives the blocks that each rank holds, the same on every rank; together they
        are all leaves, once. Slot i of this rank holds its block i. A NaN comes out as 0x7fc00000.
        After any error leave the group: it is unknown which rank has which part of the sum.
        """
