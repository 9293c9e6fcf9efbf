"""A `Backend` between the ranks of one host, through their arenas: no system call carries data."""

from muster.collectives.arena import BARRIER
from muster.collectives.backend import TIMEOUT_SECONDS, Data
from muster.collectives.errors import ChannelClosed, InvalidRank, SelfMessage
from muster.collectives.flags import Flags
from muster.collectives.rings import Incoming, Outgoing


class SharedMemoryBackend:
    """One group, one generation. Messages of a peer that has gone can still be received.

    A peer that dies without closing ends every wait; one that closes, those that are for it.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        peers = [peer for peer in range(flags.world_size) if peer != flags.rank]
        self._outgoing = {peer: Outgoing(flags, peer) for peer in peers}
        self._incoming = {peer: Incoming(flags, peer) for peer in peers}
        self._barriers = 0

    @property
    def rank(self) -> int:
        return self._flags.rank

    @property
    def world_size(self) -> int:
        return self._flags.world_size

    def send(self, peer: int, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._check(peer)
        if self._flags.is_closed(peer):
            raise ChannelClosed(peer)
        deadline = self._flags.deadline(timeout_seconds, f"room for a message to rank {peer}")
        self._outgoing[peer].send(memoryview(data).cast("B"), deadline)

    def receive(
        self, peer: int, size_bytes: int, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> bytearray:
        message = bytearray(size_bytes)
        self.receive_into(peer, memoryview(message), timeout_seconds=timeout_seconds)
        return message

    def receive_into(
        self, peer: int, target: memoryview, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._check(peer)
        deadline = self._flags.deadline(timeout_seconds, f"a message of rank {peer}")
        self._incoming[peer].receive_into(target.cast("B"), deadline)

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._refuse_if_closed()
        # Counted when it is over: one that timed out is the same one when it is called again.
        barrier = self._barriers + 1
        self._flags.raise_to(BARRIER, barrier)
        deadline = self._flags.deadline(timeout_seconds, "the slowest rank of a barrier")
        self._flags.wait_for_all(BARRIER, barrier, deadline)
        self._barriers = barrier

    def close(self) -> None:
        self._flags.close()

    def _check(self, peer: int) -> None:
        if not 0 <= peer < self.world_size:
            raise InvalidRank(peer, self.world_size)
        if peer == self.rank:
            raise SelfMessage(peer)
        self._refuse_if_closed()

    def _refuse_if_closed(self) -> None:
        if self._flags.is_closed(self.rank):
            raise ChannelClosed(self.rank)
