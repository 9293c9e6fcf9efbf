"""A `Backend` between the ranks of one host through shared memory, without system calls."""

import socket
from collections.abc import Mapping

from muster.collectives.arena import BARRIER
from muster.collectives.backend import MESSAGE_LIMIT_BYTES, TIMEOUT_SECONDS
from muster.collectives.deadline import Deadline
from muster.collectives.flags import Flags
from muster.collectives.message_backend import MessageBackend
from muster.collectives.rings import RingStream


class SharedMemoryBackend(MessageBackend):
    """One group of one generation. Messages that a peer sent before it left can be received."""

    def __init__(
        self,
        flags: Flags,
        *,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        watches: Mapping[int, socket.socket] | None = None,
    ) -> None:
        """`watches` are connections to the other ranks, which end when those die; it owns them."""
        ends = watches or {}
        peers = [peer for peer in range(flags.world_size) if peer != flags.rank]
        super().__init__(
            flags.rank,
            flags.world_size,
            {peer: RingStream(flags, peer, ends.get(peer)) for peer in peers},
            limit_bytes=limit_bytes,
            on_wait=flags.on_wait,
        )
        self._flags = flags
        self._barriers = 0

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._flags.check_open()
        # Counted at the end, so that a barrier that timed out can be called again.
        barrier = self._barriers + 1
        self._flags.raise_to(BARRIER, barrier)
        self._flags.wait_for_all(BARRIER, barrier, Deadline(timeout_seconds, "a barrier"))
        self._barriers = barrier

    def close(self) -> None:
        self._flags.close()  # also a group of one, which has no stream
        super().close()
