"""All-reduce on one host without a copy: ranks add up each other's slots where they lie.

Long vectors are cut into one part per rank. Everybody says that its slots are ready, waits for
all, sums its own part of everybody's slots into a result that all share, says so, waits for all and
reads the result in place. Short ones every rank sums whole, into memory of its own.

*One shared result is enough.* It is written between "all slots of call n are ready" and "my part of
call n is summed". A rank says the former by calling `all_reduce`, so from then on it does not read
the result of call n - 1; and it returns from call n when all have said the latter, so nobody writes
while it reads. *For short vectors two halves are enough*: a rank writes half n % 2 in call n + 2,
after call n + 1 has returned to it, for which everybody had to be done with call n.

A rank that leaves the group in the middle of a call may write its slots for its next group while
others still sum them here. They notice at the end (`Flags.confirm`) and return no such sum.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.arena import PUBLISHED, SUMMED, map_memory
from muster.collectives.backend import TIMEOUT_SECONDS, Vector
from muster.collectives.deadline import Deadline
from muster.collectives.flags import Flags
from muster.collectives.summation import add_piece, add_up, plan_of, quiet_context
from muster.collectives.tree import Block, Deal
from muster.contracts.shards import ranges

PART_ELEMENTS: Final = 1024
"""Parts are whole pages: no two ranks write to one cache line. Where a vector is cut changes no
bit, for every element is summed alone."""

_WAITED_FOR: Final = "the slowest rank of a sum"


class ArenaReducer:
    """A `Reducer` over the arenas of one generation.

    After an error the slots are to be left as they are until `all_reduce` is called again, which
    goes on with the same call, or until a new generation is taken up.
    """

    def __init__(self, flags: Flags, result_descriptor: int) -> None:
        """`result_descriptor` is the group's own memfd; it stays the caller's, who may close it.

        Every rank of the group, and nobody else, is given the same. Raises `TransportFailed`.
        """
        geometry = flags.own.geometry
        self._flags = flags
        self._result = (
            np.empty(geometry.elements, np.float32)
            if geometry.is_short
            else _shared_vector(result_descriptor, geometry.elements)
        )
        self._view = self._result.view()
        self._view.flags.writeable = False
        self._deal: Deal = []
        self._sum: _SumAlone | _SumTogether
        self._calls = 0

    @property
    def slots(self) -> NDArray[np.float32]:
        return self._flags.own.slots

    def all_reduce(self, deal: Deal, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Vector:
        self._flags.check_open()
        if deal != self._deal:
            self._take_up([tuple(blocks) for blocks in deal])
        self._sum.run(self._calls + 1, timeout_seconds)
        self._calls += 1
        return self._view

    def _take_up(self, deal: list[tuple[Block, ...]]) -> None:
        """Plan for `deal`, which is good until another one comes."""
        world_size, slot_count = self._flags.world_size, len(self.slots)
        if len(deal) != world_size or max(map(len, deal)) > slot_count:
            raise ValueError(
                f"{[len(blocks) for blocks in deal]} blocks are dealt out; there are "
                f"{world_size} ranks with {slot_count} slots each"
            )
        way = _SumAlone if self._flags.own.geometry.is_short else _SumTogether
        self._sum = way(self._flags, deal, self._result)
        self._deal = deal


class _SumTogether:
    """Each rank sums its part of the elements into the shared result."""

    def __init__(self, flags: Flags, deal: Deal, result: Vector) -> None:
        self._flags = flags
        self._plan = plan_of([block for blocks in deal for block in blocks])
        part = part_of(result.size, flags.rank, flags.world_size)
        self._operands = _rows([arena.slots[:, part] for arena in flags.arenas], deal)
        self._target = result[part]
        self._summed = 0

    def run(self, call: int, timeout_seconds: float) -> None:
        flags, deadline = self._flags, Deadline(timeout_seconds, _WAITED_FOR)
        flags.raise_to(PUBLISHED, call)
        flags.wait_for_all(PUBLISHED, call, deadline)
        if self._summed != call:  # else the call was interrupted later, and others may be past it
            add_up(self._plan, self._operands, self._target)
            self._summed = call
            flags.raise_to(SUMMED, call)
        flags.wait_for_all(SUMMED, call, deadline)
        flags.confirm(SUMMED)


class _SumAlone:
    """Each rank sums everything, from the halves that are this call's."""

    def __init__(self, flags: Flags, deal: Deal, result: Vector) -> None:
        self._flags = flags
        self._plan = plan_of([block for blocks in deal for block in blocks])
        halves = [[arena.halves[half] for arena in flags.arenas] for half in (0, 1)]
        scratch = np.empty((self._plan.temporaries, result.size), np.float32)
        self._buffers = [[*_rows(half, deal), result, *scratch] for half in halves]
        self._quiet = quiet_context()
        held = len(deal[flags.rank])
        self._source = flags.own.slots[:held].reshape(-1).data
        self._copies = [half[flags.rank][:held].reshape(-1).data for half in halves]

    def run(self, call: int, timeout_seconds: float) -> None:
        flags, half = self._flags, call % 2
        self._copies[half][:] = self._source  # for so few bytes numpy would take longer
        flags.raise_to(PUBLISHED, call)
        if not flags.have_all(PUBLISHED, call):  # who comes last waits for nobody
            flags.wait_for_all(PUBLISHED, call, Deadline(timeout_seconds, _WAITED_FOR))
        self._quiet.run(add_piece, self._plan, self._buffers[half])
        flags.confirm(PUBLISHED)


def _rows(arrays: Sequence[NDArray[np.float32]], deal: Deal) -> list[Vector]:
    """Return the vectors of all blocks in the order of the deal, each rank's from its array."""
    return [row for array, blocks in zip(arrays, deal, strict=True) for row in array[: len(blocks)]]


def _shared_vector(descriptor: int, elements: int) -> Vector:
    memory = map_memory(descriptor, elements * np.dtype(np.float32).itemsize, is_writable=True)
    return np.ndarray((elements,), np.float32, memory)


def part_of(elements: int, rank: int, world_size: int) -> slice:
    """Return which elements `rank` adds up."""
    start, stop = ranges(-(-elements // PART_ELEMENTS), world_size)[rank]
    return slice(min(start * PART_ELEMENTS, elements), min(stop * PART_ELEMENTS, elements))
