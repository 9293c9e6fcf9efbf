"""A `Backend` between the ranks of one host through shared memory, without system calls."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from muster.collectives.backend import MESSAGE_LIMIT_BYTES, TIMEOUT_SECONDS
from muster.collectives.deadline import Deadline
from muster.collectives.errors import InvalidWorldSize
from muster.collectives.transports.arena import BARRIER
from muster.collectives.transports.flags import Flags
from muster.collectives.transports.message_backend import MessageBackend
from muster.collectives.transports.rings import RingStream


class SharedMemoryBackend(MessageBackend):
    """One group of one generation. Messages that a peer sent before it left can be received."""

    def __init__(
        self,
        flags: Flags,
        *,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        watches: Mapping[int, io.FileIO] | None = None,
    ) -> None:
        """`watches` are readable once other ranks are dead; it owns them."""
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
        self._is_watched = bool(ends)
        self._barriers = 0

    @classmethod
    def connect(
        cls,
        path: str | Path,
        rank: int,
        world_size: int,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Self:
        """Return the backend once all ranks, processes of one user, have met at `path`.

        Rank 0 makes a Unix socket there and removes it again. Raises `InvalidWorldSize` below 1,
        `InvalidRank`, `PeerRefused`, `BackendUnavailable`, `Timeout` and `TransportFailed`.
        """
        # Here and not above: a managed rank gets its memory from its agent.
        from muster.collectives.transports.unix_rendezvous import exchange_memory  # noqa: PLC0415

        if world_size < 1:
            raise InvalidWorldSize(world_size)
        deadline = Deadline(timeout_seconds, f"the ranks at {path}")
        shared = exchange_memory(Path(path), rank, world_size, deadline)
        flags = Flags(arenas=shared.arenas, rank=rank, generation=1, on_wait=lambda: None)
        return cls(flags, watches=shared.watches)

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        if self._is_watched:  # the flags know nothing of a death, if no agent tells of it
            super().barrier(timeout_seconds=timeout_seconds)
            return
        self._flags.check_open()
        # Counted at the end, so that a barrier that timed out can be called again.
        barrier = self._barriers + 1
        self._flags.raise_to(BARRIER, barrier)
        self._flags.wait_for_all(BARRIER, barrier, Deadline(timeout_seconds, "a barrier"))
        self._barriers = barrier

    def _break(self) -> None:
        self._flags.close()  # there is no connection whose end would tell
        super()._break()

    def close(self) -> None:
        self._flags.close()  # also a group of one, which has no stream
        super().close()
