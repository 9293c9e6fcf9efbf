"""All-reduce in two levels: ranks of a host hand their blocks to one of them, hosts sum those.

The first rank of each host, its *leader*, compresses what the host has and talks to the leaders of
the other hosts. The ranks of a host share memory where they can (`ArenaHostReducer`), or else send
their blocks over loopback.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import TIMEOUT_SECONDS, Backend
from muster.collectives.deadline import Deadline
from muster.collectives.operations import messages_of
from muster.collectives.reduction.arena_reducer import shared_vector
from muster.collectives.reduction.compressed import Compression
from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.tree import BlockAssignment
from muster.collectives.subgroups import SubBackend
from muster.collectives.transports.arena import PUBLISHED, SUMMED
from muster.collectives.transports.flags import Flags

Parts: TypeAlias = Sequence[tuple[int, memoryview]]
"""The memory that goes to, or comes from, each rank."""


class HostReducer:
    """A `Reducer` whose groups, as `assign_blocks` deals them, lie on one host each."""

    def __init__(
        self, backend: Backend, slots: NDArray[np.float32], compression: Compression
    ) -> None:
        ranks = range(backend.world_size)
        self._hosts = [
            [rank for rank in ranks if backend.hosts[rank] == host]
            for host in dict.fromkeys(backend.hosts)
        ]
        self._members = next(members for members in self._hosts if backend.rank in members)
        self._leader = self._members[0]
        if backend.rank == self._leader:
            self._leaders = SubBackend(backend, [members[0] for members in self._hosts])
        self._backend = backend
        self._compression = compression
        self.slots = slots
        self._result: Vector = np.zeros(slots.shape[1], np.float32)

    def all_reduce(
        self, assignment: BlockAssignment, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Vector:
        deadline = Deadline(timeout_seconds, "an all-reduce")
        self._sum(assignment, deadline)
        return self._result

    def _sum(self, assignment: BlockAssignment, deadline: Deadline) -> None:
        """Write the sum over all hosts into the result."""
        rank, others = self._backend.rank, self._members[1:]
        own = [*self.slots[: len(assignment[rank])]]
        if rank != self._leader:
            self._exchange(_messages((self._leader, row) for row in own), [], deadline)
            self._exchange([], _messages([(self._leader, self._result)]), deadline)
            return
        peers = [peer for peer in others for _ in assignment[peer]]
        inbox = [np.empty_like(self._result) for _ in peers]
        self._exchange([], _messages(zip(peers, inbox, strict=True)), deadline)
        self._sum_hosts(assignment, [*own, *inbox], self._result, deadline)
        self._exchange(_messages((peer, self._result) for peer in others), [], deadline)

    def _sum_hosts(
        self, assignment: BlockAssignment, rows: Sequence[Vector], out: Vector, deadline: Deadline
    ) -> None:
        blocks = [
            [block for rank in members for block in assignment[rank]] for members in self._hosts
        ]
        self._compression.sum_hosts(self._leaders, blocks, rows, out, deadline)

    def _exchange(self, outgoing: Parts, incoming: Parts, deadline: Deadline) -> None:
        self._backend.exchange(outgoing, incoming, timeout_seconds=deadline.left_seconds)


class ArenaHostReducer(HostReducer):
    """The same with the blocks and the result in memory that the ranks of a host share."""

    def __init__(
        self, backend: Backend, flags: Flags, result_descriptor: int, compression: Compression
    ) -> None:
        """`flags` are of the arenas of this host's ranks, in the order of the group.

        The caller keeps the descriptor of the result and may close it. Raises `TransportFailed`.
        """
        super().__init__(backend, flags.own.slots, compression)
        self._flags = flags
        self._shared = shared_vector(result_descriptor, self._result.size)
        self._result = self._shared.view()
        self._result.flags.writeable = False  # a store to it would change all ranks' sums
        self._calls = 0

    def _sum(self, assignment: BlockAssignment, deadline: Deadline) -> None:
        flags, call = self._flags, self._calls + 1
        flags.check_open()
        flags.raise_to(PUBLISHED, call)
        if self._backend.rank == self._leader:
            flags.wait_for_all(PUBLISHED, call, deadline)
            arenas = zip(self._members, flags.arenas, strict=True)
            rows = [row for rank, arena in arenas for row in arena.slots[: len(assignment[rank])]]
            self._sum_hosts(assignment, rows, self._shared, deadline)
        flags.raise_to(SUMMED, call)  # the others at once: all but the leader's is waited for
        flags.wait_for_all(SUMMED, call, deadline)
        flags.confirm(SUMMED)
        self._calls = call


def _messages(vectors: Iterable[tuple[int, Vector]]) -> Parts:
    """Return vectors as the messages that a backend takes: a large one is several."""
    return [(peer, message) for peer, vector in vectors for message in messages_of(vector)]
