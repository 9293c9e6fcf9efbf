"""All-reduce in the order of the fixed tree over messages, where memory is not shared.

Each rank owns a contiguous part of the elements. It receives the slices of that part from all
ranks, adds them up and sends the sum to all. This happens in rounds, which bounds the buffers; the
sums of one round travel with the slices of the next. Small vectors are summed by every rank, which
saves the second exchange.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import TIMEOUT_SECONDS, Backend
from muster.collectives.deadline import Deadline
from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.summation import Adder, AdderOf, tree_adder
from muster.collectives.reduction.tree import Block, BlockAssignment
from muster.contracts.shards import ranges

PAGE_ELEMENTS: Final = 1024
"""Parts are cut at pages, so that each begins at its own cache line."""

ROUND_ELEMENTS: Final = 4_194_304
"""16 MB of each slice. All ranks wait for each other at the end of a round; 1 MB rounds are as fast
on an idle machine and 1.5 times slower on a busy one."""

SMALL_ELEMENTS: Final = 32_768
"""Up to this many elements over all ranks, a second message costs more than extra additions."""

Pieces: TypeAlias = Sequence[slice]
"""For each rank, the elements that it sums in one round."""


class MessageReducer:
    """The `Reducer` over any `Backend`."""

    def __init__(
        self, backend: Backend, slots: NDArray[Any], adder_of: AdderOf = tree_adder
    ) -> None:
        """`slots` belongs to the caller and is reused by later groups.

        They are float32 unless `adder_of`, which says how blocks are added up, takes another type.
        """
        elements = slots.shape[1]
        self._backend = backend
        self._peers = [rank for rank in range(backend.world_size) if rank != backend.rank]
        self.slots = slots
        self._result = np.zeros(elements, slots.dtype)
        self._adder_of: Final = adder_of
        self._nothing: Pieces = [slice(0, 0)] * backend.world_size
        self._small = elements * backend.world_size <= SMALL_ELEMENTS
        self._rounds = rounds_of(elements, backend.world_size)
        if self._small:
            # Every rank sums the whole vector, so the slice for each peer is all of it.
            self._rounds = [[slice(0, elements)] * backend.world_size]
        self._assignment: BlockAssignment = []
        self._add: Adder
        self._inbox: list[NDArray[Any]]

    def all_reduce(
        self, assignment: BlockAssignment, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Vector:
        """As `Reducer`. Raises ValueError if the assignment does not fit group, tree or slots."""
        deadline = Deadline(timeout_seconds, "an all-reduce")
        if assignment != self._assignment:
            self._prepare([tuple(blocks) for blocks in assignment])
        before = self._nothing
        for pieces in self._rounds:
            self._exchange(pieces, before, deadline)
            self._add_up(pieces[self._backend.rank])
            before = self._nothing if self._small else pieces
        self._exchange(self._nothing, before, deadline)
        return self._result

    def _prepare(self, assignment: list[tuple[Block, ...]]) -> None:
        """Create plan and inbox for a new `assignment`."""
        rank, world_size = self._backend.rank, self._backend.world_size
        if len(assignment) != world_size:
            raise ValueError(f"the assignment has {len(assignment)} ranks, the group {world_size}")
        if len(assignment[rank]) > len(self.slots):
            raise ValueError(
                f"rank {rank} has {len(assignment[rank])} blocks for {len(self.slots)} slots"
            )
        self._add = self._adder_of([block for blocks in assignment for block in blocks])
        longest = max(piece.stop - piece.start for piece in self._rounds[0])
        self._inbox = [
            np.empty((len(blocks) if peer != rank else 0, longest), self.slots.dtype)
            for peer, blocks in enumerate(assignment)
        ]
        self._assignment = assignment

    def _exchange(self, pieces: Pieces, before: Pieces, deadline: Deadline) -> None:
        """Exchange the slices of `pieces`, and the sums of the round `before`."""
        rank = self._backend.rank
        held = self.slots[: len(self._assignment[rank])]
        outgoing: list[tuple[int, memoryview]] = []
        incoming: list[tuple[int, memoryview]] = []
        for peer in self._peers:
            # First the slices, then the sum, on both ends: messages of a pair match by their order.
            outgoing += [(peer, part) for part in _bytes_of(held, pieces[peer])]
            outgoing += [(peer, part) for part in _bytes_of([self._result], before[rank])]
            incoming += [(peer, part) for part in _bytes_of(self._inbox_of(peer, pieces[rank]))]
            incoming += [(peer, part) for part in _bytes_of([self._result], before[peer])]
        self._backend.exchange(outgoing, incoming, timeout_seconds=deadline.left_seconds)

    def _add_up(self, piece: slice) -> None:
        rank = self._backend.rank
        # In the order of the adder's blocks, rank by rank. Our own are read where they are.
        operands: list[Vector] = []
        for peer, blocks in enumerate(self._assignment):
            own = self.slots[: len(blocks), piece]
            operands.extend(own if peer == rank else self._inbox_of(peer, piece))
        self._add(operands, self._result[piece], piece.start)

    def _inbox_of(self, peer: int, piece: slice) -> NDArray[Any]:
        """Return the memory for the slices of `peer` that belong to this rank's `piece`."""
        return self._inbox[peer][:, : piece.stop - piece.start]


def rounds_of(elements: int, world_size: int) -> list[Pieces]:
    """Cut [0, elements) into a contiguous part per rank, and these into equally many pieces."""
    pages = -(-elements // PAGE_ELEMENTS)
    parts = [
        range(start * PAGE_ELEMENTS, min(stop * PAGE_ELEMENTS, elements))
        for start, stop in ranges(pages, world_size)
    ]
    longest = max(len(part) for part in parts)
    return [
        [_slice(part[start : start + ROUND_ELEMENTS]) for part in parts]
        for start in range(0, longest, ROUND_ELEMENTS)
    ]


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _bytes_of(vectors: Iterable[Vector], piece: slice = slice(None)) -> Iterator[memoryview]:
    """Yield the memory of the `piece` of each vector, unless it is empty."""
    for vector in vectors:
        if (part := vector[piece]).size:
            yield part.data.cast("B")
