"""All-reduce in two levels: ranks of a host hand their blocks to one of them, hosts sum those.

The first rank of each host, its *leader*, compresses what the host has and talks to the leaders of
the other hosts. The ranks of a host share memory where they can (`ArenaHostReducer`), or else send
their blocks over loopback.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import TIMEOUT_SECONDS, Backend
from muster.collectives.deadline import Deadline
from muster.collectives.reduction.arena_reducer import shared_vector
from muster.collectives.reduction.compressed import Compression, HostSum
from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.tree import Block, BlockAssignment
from muster.collectives.subgroups import SubBackend
from muster.collectives.transports.arena import PUBLISHED, SUMMED
from muster.collectives.transports.flags import Flags


class HostReducer:
    """A `Reducer` whose groups, as `assign_groups` deals them, lie on one host each."""

    def __init__(
        self, backend: Backend, slots: NDArray[np.float32], compression: Compression
    ) -> None:
        hosts = backend.hosts or (0,) * backend.world_size
        self._backend: Final = backend
        self._compression: Final = compression
        self.slots = slots
        self._hosts: Final = [
            [rank for rank, host in enumerate(hosts) if host == each]
            for each in dict.fromkeys(hosts)
        ]
        self._members: Final = next(ranks for ranks in self._hosts if backend.rank in ranks)
        self._is_leader: Final = self._members[0] == backend.rank
        if self._is_leader:
            self._leaders: Final = SubBackend(backend, [ranks[0] for ranks in self._hosts])
        self._result: Vector = np.zeros(slots.shape[1], np.float32)
        self._assignment: BlockAssignment = []
        self._add: HostSum
        self._inbox: list[NDArray[np.float32]] = []

    def all_reduce(
        self, assignment: BlockAssignment, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Vector:
        deadline = Deadline(timeout_seconds, "an all-reduce")
        if assignment != self._assignment:
            self._assignment = [tuple(blocks) for blocks in assignment]
            if self._is_leader:
                self._prepare()
        self._sum(deadline)
        return self._result

    def _prepare(self) -> None:
        blocks: list[Sequence[Block]] = [
            [block for rank in ranks for block in self._assignment[rank]] for ranks in self._hosts
        ]
        self._add = self._compression.over_hosts(self._leaders, blocks)

    def _sum(self, deadline: Deadline) -> None:
        """Write the sum over all hosts into the result."""
        blocks = self._assignment[self._backend.rank]
        own, result = list(self.slots[: len(blocks)]), _bytes_of(self._result)
        if not self._is_leader:
            leader = self._members[0]
            outgoing = [(leader, _bytes_of(row)) for row in own]
            self._backend.exchange(outgoing, [], timeout_seconds=deadline.left_seconds)
            incoming = [(leader, result)]
            self._backend.exchange([], incoming, timeout_seconds=deadline.left_seconds)
            return
        others = [peer for peer in self._members[1:] for _ in self._assignment[peer]]
        if len(self._inbox) != len(others):
            self._inbox = list(np.empty((len(others), self._result.size), np.float32))
        incoming = [(peer, _bytes_of(row)) for peer, row in zip(others, self._inbox, strict=True)]
        self._backend.exchange([], incoming, timeout_seconds=deadline.left_seconds)
        self._add([*own, *self._inbox], self._result, deadline)
        outgoing = [(peer, result) for peer in self._members[1:]]
        self._backend.exchange(outgoing, [], timeout_seconds=deadline.left_seconds)


class ArenaHostReducer(HostReducer):
    """The same with the blocks and the result in memory that the ranks of a host share."""

    def __init__(
        self, backend: Backend, flags: Flags, result_descriptor: int, compression: Compression
    ) -> None:
        """`flags` are of the arenas of this host's ranks, in the order of the group.

        The caller keeps the descriptor of the result and may close it. Raises `TransportFailed`.
        """
        super().__init__(backend, flags.own.slots, compression)
        self._flags: Final = flags
        self._shared: Final = shared_vector(result_descriptor, self._result.size)
        self._result = self._shared.view()
        self._result.flags.writeable = False  # a store to it would change all ranks' sums
        self._calls = 0

    def _sum(self, deadline: Deadline) -> None:
        flags, call = self._flags, self._calls + 1
        flags.check_open()
        flags.raise_to(PUBLISHED, call)
        if self._is_leader:
            flags.wait_for_all(PUBLISHED, call, deadline)
            rows = [
                row
                for rank, arena in zip(self._members, flags.arenas, strict=True)
                for row in arena.slots[: len(self._assignment[rank])]
            ]
            self._add(rows, self._shared, deadline)
        flags.raise_to(SUMMED, call)  # the others at once: all but the leader's is waited for
        flags.wait_for_all(SUMMED, call, deadline)
        flags.confirm(SUMMED)
        self._calls = call


def _bytes_of(vector: Vector) -> memoryview:
    return vector.data.cast("B")
