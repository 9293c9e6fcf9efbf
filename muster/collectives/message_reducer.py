"""Sums by the fixed tree over messages: across hosts, or wherever memory is not shared.

Each rank owns a contiguous part of the elements. It is sent everybody's slices of that part, adds
them up and sends the sum to all: in rounds, so that what comes needs little room; the sums of one
round travel with the slices of the next. What is small everybody adds up for itself, which saves
the second way.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import TIMEOUT_SECONDS, Backend, Vector
from muster.collectives.deadline import Deadline
from muster.collectives.summation import Plan, add_up, plan_of
from muster.collectives.tree import Block, Deal
from muster.contracts.shards import ranges

PAGE_ELEMENTS: Final = 1024
"""Parts are cut at pages, so that each rank's begins at a cache line of its own."""

ROUND_ELEMENTS: Final = 4_194_304
"""16 MB of each slice. At the end of a round everybody waits for everybody, which costs most where
processors are shared; 1 MB is as fast on an idle machine, and half as slow again on a busy one."""

SMALL_ELEMENTS: Final = 32_768
"""Up to so many elements over all ranks, a second message costs more than another addition."""

Pieces: TypeAlias = Sequence[slice]
"""For each rank the piece of the elements that it adds up in one round."""


class MessageReducer:
    """The `Reducer` over any `Backend`; slots that are never touched take no memory."""

    def __init__(self, backend: Backend, slots: NDArray[np.float32]) -> None:
        """`slots` is the caller's, so that what lies in it outlives this group."""
        elements = slots.shape[1]
        self._backend = backend
        self._peers = [rank for rank in range(backend.world_size) if rank != backend.rank]
        self._slots = slots
        self._result = np.zeros(elements, np.float32)
        self._nothing: Pieces = [slice(0, 0)] * backend.world_size
        self._small = elements * backend.world_size <= SMALL_ELEMENTS
        self._rounds = rounds_of(elements, backend.world_size)
        if self._small:
            self._rounds = [[slice(0, elements)] * backend.world_size]
        self._deal: Deal = []
        self._plan: Plan
        self._inbox: list[NDArray[np.float32]]

    @property
    def slots(self) -> NDArray[np.float32]:
        return self._slots

    def all_reduce(self, deal: Deal, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Vector:
        """As `Reducer`. Raises ValueError for a deal that does not fit group, tree or slots."""
        deadline = Deadline(timeout_seconds, "an all-reduce")
        if deal != self._deal:
            self._take_up([tuple(blocks) for blocks in deal])
        before = self._nothing
        for pieces in self._rounds:
            self._exchange(pieces, before, deadline)
            self._add_up(pieces[self._backend.rank])
            before = self._nothing if self._small else pieces
        self._exchange(self._nothing, before, deadline)
        return self._result

    def _take_up(self, deal: list[tuple[Block, ...]]) -> None:
        """Make plan and inbox for `deal`, which is good until another one comes."""
        rank, world_size = self._backend.rank, self._backend.world_size
        if len(deal) != world_size:
            raise ValueError(f"a deal to {len(deal)} ranks is not one to {world_size}")
        if len(deal[rank]) > len(self._slots):
            raise ValueError(
                f"rank {rank} cannot hold {len(deal[rank])} blocks in {len(self._slots)} slots"
            )
        self._plan = plan_of([block for blocks in deal for block in blocks])
        longest = max(piece.stop - piece.start for piece in self._rounds[0])
        self._inbox = [
            np.empty((len(blocks) if peer != rank else 0, longest), np.float32)
            for peer, blocks in enumerate(deal)
        ]
        self._deal = deal

    def _exchange(self, pieces: Pieces, before: Pieces, deadline: Deadline) -> None:
        """Exchange the slices of `pieces`, and the sums of the round `before`."""
        rank = self._backend.rank
        held = self._slots[: len(self._deal[rank])]
        outgoing: list[tuple[int, memoryview]] = []
        incoming: list[tuple[int, memoryview]] = []
        for peer in self._peers:
            outgoing += [(peer, part) for part in _bytes_of(held, pieces[peer])]
            outgoing += [(peer, part) for part in _bytes_of([self._result], before[rank])]
            incoming += [(peer, part) for part in _bytes_of(self._came(peer, pieces[rank]))]
            incoming += [(peer, part) for part in _bytes_of([self._result], before[peer])]
        self._backend.exchange(outgoing, incoming, timeout_seconds=deadline.left_seconds)

    def _add_up(self, piece: slice) -> None:
        rank = self._backend.rank
        operands: list[Vector] = []
        for peer, blocks in enumerate(self._deal):
            own = self._slots[: len(blocks), piece]
            operands.extend(own if peer == rank else self._came(peer, piece))
        add_up(self._plan, operands, self._result[piece])

    def _came(self, peer: int, piece: slice) -> NDArray[np.float32]:
        """Return where the slices of `peer` for this rank's `piece` are put."""
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
    """Yield where the `piece` of each vector lies; nothing for an empty one."""
    for vector in vectors:
        if (part := vector[piece]).size:
            yield part.data.cast("B")
