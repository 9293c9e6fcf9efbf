"""The interface of a transport."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from muster.collectives.deadline import Deadline
from muster.collectives.errors import Unsupported

Data: TypeAlias = bytes | bytearray | memoryview

TIMEOUT_SECONDS: Final = 60.0
"""Default timeout of a collective."""

MESSAGE_LIMIT_BYTES: Final = 512 << 20
"""A longer length prefix is corrupt or hostile; nothing of that size is allocated."""

OnWait: TypeAlias = Callable[[], None]
"""Called while a call waits; what it raises ends the wait."""

ON_WAIT_SECONDS: Final = 0.02
"""The longest time between two such calls."""

BARRIER_BIT: Final = 1 << 63
"""Of a context: its barriers. Their messages never match those of its callers."""


class Tag(NamedTuple):
    """What a message belongs to. It matches only a receive with the same context and sequence."""

    context: int = 0
    """The group; 0 is the one that the backend was made for, others are views of it."""
    sequence: int = 0
    """The operation, counted from 1 in each group. 0: a message between two ranks. Messages of an
    operation that is over are dropped."""
    call: int = 0
    """Operation, data type and options; another value is a `CallMismatch`."""
    members: frozenset[int] | None = None
    """The ranks of the group; the death of others does not end a wait. None: all. Not sent."""


MESSAGE: Final = Tag()


class Accumulator(Protocol):
    """Takes the bytes of a message as they arrive, instead of memory that they would fill."""

    nbytes: int

    def put(self, offset: int, data: memoryview) -> None:
        """Take `data`, which begins at byte `offset` of the message and holds whole elements."""


Target: TypeAlias = memoryview | Accumulator

ELEMENT_BYTES: Final = 16
"""A multiple of the size of every element. Accumulators get multiples of it, up to the last."""


def fill(target: Target, offset: int, data: memoryview) -> None:
    """Put the bytes of a message from `offset` on where they belong."""
    if isinstance(target, memoryview):
        target[offset : offset + data.nbytes] = data
    else:
        target.put(offset, data)


class Backend(ABC):
    """Messages between the ranks of one fixed group; a new group needs a new backend.

    Messages of a pair and a tag arrive whole, once and in the order they were sent. All methods
    may be called from several threads, except `barrier` and `close`, and may raise a
    `CollectiveError`.
    After `Timeout` and `SizeMismatch` the backend is as before the call; a message whose sending
    timed out is still sent, so do not repeat it. A peer outside of the group is `InvalidRank`,
    this rank itself `SelfMessage`; a message above the limit, and memory that is not contiguous or
    cannot be written, are `Unsupported`.

    The death of any peer ends every wait of its groups at once: a socket raises `ChannelClosed`,
    and in shared memory what `on_wait` raises. A peer that closed raises it only in calls that
    still need that peer, after everything it had sent was received: a rank that has finished may
    leave while others still work.
    """

    rank: int
    """The position of this rank in the group."""
    world_size: int
    hosts: tuple[int, ...] = ()
    """A number for each rank, equal where ranks share a host. Empty: all share one."""
    depth = 0
    """How many views of other backends this one is above a transport."""
    _barrier_round = 0
    _has_sent_round = False

    @abstractmethod
    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, Target]],
        *,
        tag: Tag = MESSAGE,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Send all of `outgoing` and fill all of `incoming`, in the given order for each peer.

        Sending and receiving overlap, so an exchange among all ranks cannot deadlock. Returns when
        the sent data may be modified; it may not have arrived yet. After `Timeout` or
        `SizeMismatch` it is unknown which targets are filled.
        """

    def probe(
        self,
        tag: Tag = MESSAGE,  # noqa: ARG002  some backends only
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,  # noqa: ARG002
    ) -> int:
        """Return a rank whose next message with this tag has begun to come; it stays unread.

        Messages from any rank are received so. Raises `Unsupported` where a backend cannot tell.
        """
        raise Unsupported("this backend receives from a rank that is given: pass one")

    @abstractmethod
    def abort(self, tag: Tag, reason: str) -> None:
        """End the operation of `tag` on all other ranks, which raise `Aborted`. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice, but not during another call."""

    def counters(self) -> dict[str, float]:
        """Return what a transport counts: ``network.bytes_sent``, ``peers.gone`` and so on."""
        return {}

    def send(self, peer: int, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Send `data`, and return when it may be modified; it may not have arrived yet.

        Two ranks may send to each other at the same time, any amount. A cycle of more than two
        ranks needs `exchange`.
        """
        self.exchange([(peer, data)], [], timeout_seconds=timeout_seconds)

    def recv(
        self, peer: int, size_bytes: int, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> bytearray:
        """Return the next message of `peer`, which must have `size_bytes`.

        A message of another size raises `SizeMismatch` and can still be received.
        """
        message = bytearray(size_bytes)
        self.recv_into(peer, memoryview(message), timeout_seconds=timeout_seconds)
        return message

    def recv_into(
        self, peer: int, target: memoryview, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Fill the contiguous `target` with the next message of `peer`, without a copy."""
        self.exchange([], [(peer, target)], timeout_seconds=timeout_seconds)

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Return when every rank of the group has called this.

        In round k each rank learns of the 2^k ranks before it (the dissemination barrier of
        Hensgen, Finkel and Manber, 1988). After `Timeout` the next call goes on where this ended.
        Call it from one thread at a time.
        """
        deadline = Deadline(timeout_seconds, "a barrier")
        tag = Tag(context=BARRIER_BIT)
        for to, source in barrier_rounds(self.rank, self.world_size)[self._barrier_round :]:
            # Once, also after a `Timeout`: the peer would take another for that of a later barrier.
            if not self._has_sent_round:
                self._has_sent_round = True
                self.exchange([(to, b"")], [], tag=tag, timeout_seconds=deadline.left_seconds)
            target = [(source, memoryview(bytearray()))]
            self.exchange([], target, tag=tag, timeout_seconds=deadline.left_seconds)
            self._has_sent_round = False
            self._barrier_round += 1
        self._barrier_round = 0


def barrier_rounds(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return to which rank an empty message goes in each round, and from which one comes."""
    steps = [1 << number for number in range((world_size - 1).bit_length())]
    return [((rank + step) % world_size, (rank - step) % world_size) for step in steps]
