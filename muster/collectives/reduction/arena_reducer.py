"""All-reduce on one host without a copy: ranks sum each other's slots in place.

Long vectors are cut into one part per rank. Each rank publishes that its slots are ready, waits for
all, sums its own part of all slots into a shared result, publishes that, waits for all and reads
the result in place. Short vectors are summed whole by every rank, into its own memory.

*One shared result is enough.* It is written between "all slots of call n are ready" and "my part of
call n is summed". A rank publishes the former by calling `all_reduce`, and from then on does not
read the result of call n - 1. It returns from call n when all have published the latter, so no rank
writes while it reads. *For short vectors two halves are enough*: a rank writes half n % 2 in call
n + 2, after call n + 1 has returned, for which all ranks had to finish call n.

A rank that leaves the group during a call may write to its slots while others still sum them. They
detect it at the end (`Flags.confirm`) and discard the sum.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import TIMEOUT_SECONDS
from muster.collectives.deadline import Deadline
from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.summation import (
    Adder,
    AdderOf,
    add_piece,
    plan_of,
    quiet_context,
    tree_adder,
)
from muster.collectives.reduction.tree import Block, BlockAssignment
from muster.collectives.transports.arena import PUBLISHED, SUMMED, map_memory
from muster.collectives.transports.flags import Flags
from muster.contracts.shards import ranges

PART_ELEMENTS: Final = 1024
"""Parts are whole pages, so that no two ranks write to one cache line. The cuts do not change bits,
because each element is summed by itself."""

_WAITED_FOR: Final = "the slowest rank of a sum"


class ArenaReducer:
    """A `Reducer` over the arenas of one generation.

    After an error the slots must not change until `all_reduce` is called again, which continues the
    same call, or until the rank joins a new generation.
    """

    def __init__(
        self, flags: Flags, result_descriptor: int, adder_of: AdderOf = tree_adder
    ) -> None:
        """`result_descriptor` is the memfd that all ranks of the group share.

        The caller keeps it and may close it. `adder_of` says how blocks are added up. Raises
        `TransportFailed`.
        """
        geometry = flags.own.geometry
        self._flags = flags
        self._adder_of = adder_of
        self._is_alone = geometry.is_short and adder_of is tree_adder
        self.slots = flags.own.slots
        self._result = (
            np.empty(geometry.elements, np.float32)
            if self._is_alone
            else shared_vector(result_descriptor, geometry.elements)
        )
        # Callers get the shared memory without a copy; a store to it would change all ranks' sums.
        self._view = self._result.view()
        self._view.flags.writeable = False
        self._assignment: BlockAssignment = []
        self._sum: _SumAlone | _SumTogether
        self._calls = 0

    def all_reduce(
        self, assignment: BlockAssignment, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Vector:
        self._flags.check_open()
        if assignment != self._assignment:
            self._prepare([tuple(blocks) for blocks in assignment])
        self._sum.run(self._calls + 1, timeout_seconds)
        self._calls += 1
        return self._view

    def _prepare(self, assignment: list[tuple[Block, ...]]) -> None:
        """Create the plan for a new `assignment`."""
        world_size, slot_count = self._flags.world_size, len(self.slots)
        if len(assignment) != world_size or max(map(len, assignment)) > slot_count:
            raise ValueError(
                f"{[len(blocks) for blocks in assignment]} blocks are assigned, but the "
                f"group has {world_size} ranks with {slot_count} slots each"
            )
        if self._is_alone:
            self._sum = _SumAlone(self._flags, assignment, self._result)
        else:
            add = self._adder_of([block for blocks in assignment for block in blocks])
            self._sum = _SumTogether(self._flags, assignment, self._result, add)
        self._assignment = assignment


class _SumTogether:
    """Each rank sums its part of the elements into the shared result."""

    def __init__(
        self, flags: Flags, assignment: BlockAssignment, result: Vector, add: Adder
    ) -> None:
        self._flags = flags
        self._add = add
        part = part_of(result.size, flags.rank, flags.world_size)
        self._operands = _rows([arena.slots[:, part] for arena in flags.arenas], assignment)
        self._target, self._start = result[part], part.start
        self._summed = 0

    def run(self, call: int, timeout_seconds: float) -> None:
        flags, deadline = self._flags, Deadline(timeout_seconds, _WAITED_FOR)
        flags.raise_to(PUBLISHED, call)  # after the stores to our slots
        flags.wait_for_all(PUBLISHED, call, deadline)  # before the loads from others
        # Else the call was interrupted after this. Others may have passed it and write their slots.
        if self._summed != call:
            self._add(self._operands, self._target, self._start)
            self._summed = call
            flags.raise_to(SUMMED, call)
        flags.wait_for_all(SUMMED, call, deadline)
        flags.confirm(SUMMED)  # also of what the others loaded before they raised it


class _SumAlone:
    """Each rank sums everything, from the halves of this call."""

    def __init__(self, flags: Flags, assignment: BlockAssignment, result: Vector) -> None:
        self._flags = flags
        self._plan = plan_of([block for blocks in assignment for block in blocks])
        halves = [[arena.halves[half] for arena in flags.arenas] for half in (0, 1)]
        scratch = np.empty((self._plan.temporaries, result.size), np.float32)
        self._buffers = [[*_rows(half, assignment), result, *scratch] for half in halves]
        self._quiet = quiet_context()
        held = len(assignment[flags.rank])
        self._source = flags.own.slots[:held].reshape(-1).data
        self._copies = [half[flags.rank][:held].reshape(-1).data for half in halves]

    def run(self, call: int, timeout_seconds: float) -> None:
        flags, half = self._flags, call % 2
        # A copy, as our next sums go to the slots while slower ranks may still read this one.
        self._copies[half][:] = self._source  # faster than numpy for so few bytes
        flags.raise_to(PUBLISHED, call)
        if not flags.have_all(PUBLISHED, call):  # the last rank to arrive need not wait
            flags.wait_for_all(PUBLISHED, call, Deadline(timeout_seconds, _WAITED_FOR))
        self._quiet.run(add_piece, self._plan, self._buffers[half])
        flags.confirm(PUBLISHED)


def _rows(arrays: Sequence[NDArray[np.float32]], assignment: BlockAssignment) -> list[Vector]:
    """Return the vectors of all blocks, in assignment order, each rank's from its array."""
    return [
        row
        for array, blocks in zip(arrays, assignment, strict=True)
        for row in array[: len(blocks)]
    ]


def shared_vector(descriptor: int, elements: int) -> Vector:
    memory = map_memory(descriptor, elements * np.dtype(np.float32).itemsize, is_writable=True)
    return np.ndarray((elements,), np.float32, memory)


def part_of(elements: int, rank: int, world_size: int) -> slice:
    """Return the elements that `rank` sums."""
    start, stop = ranges(-(-elements // PART_ELEMENTS), world_size)[rank]
    return slice(min(start * PART_ELEMENTS, elements), min(stop * PART_ELEMENTS, elements))
