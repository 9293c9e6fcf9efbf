"""Sums that are compressed from the level of groups up, with the same bits for every assignment.

The leaves are cut into equal subtrees, the *groups*, whose number is part of the numerics. A
group's sum is that of the float32 tree. What is sent, and what a host adds up, are functions of the
groups' sums alone, not of the ranks and hosts that have them. The last elements of a vector, which
hold loss, weight, metrics and counts, are summed as they are.

What one host adds up alone has the bits of what several do: see `adder_of` and `over_hosts`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Backend
from muster.collectives.compression import half
from muster.collectives.compression.shared_scale import (
    Dither,
    Quantizer,
    chunks_of,
    decode,
    in_chunks,
    maxima_of,
    pieces,
    scales_of,
)
from muster.collectives.deadline import Deadline
from muster.collectives.operations import all_reduce
from muster.collectives.reduction.message_reducer import MessageReducer
from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.summation import (
    Adder,
    Plan,
    canonicalise,
    plan_of,
    tree_adder,
)
from muster.collectives.reduction.tree import Block, BlockAssignment, nodes_of, root_of

HostSum: TypeAlias = Callable[[Sequence[Vector], Vector, Deadline], None]
"""Writes the sum over all hosts into a vector, given those of this host's blocks. One rank of each
host calls it."""


class GroupSums:
    """Adds up the groups of which a host has all blocks."""

    def __init__(self, blocks: Sequence[Block], level: int) -> None:
        """`level` is that of groups, and no block is above one. Raises ValueError as `plan_of`."""
        places: dict[int, list[int]] = {}
        for place, block in enumerate(blocks):
            places.setdefault(block.start >> level, []).append(place)
        self.groups: Final = sorted(places)
        self._parts: Final = [
            (places[group], plan_of([blocks[place].below(level) for place in places[group]]))
            for group in self.groups
        ]

    def of(self, vectors: Sequence[Vector], piece: slice) -> list[Vector]:
        """Return the sum of each group, read-only."""
        return [
            _climb(plan, [vectors[place][piece] for place in places])
            for places, plan in self._parts
        ]


class Compression(ABC):
    """One kind of compression in one job; all ranks have the same."""

    def __init__(self, *, leaves: int, groups: int, elements: int, seed: int) -> None:
        """The first `elements` of each vector are compressed."""
        self.leaves: Final = leaves
        self.groups: Final = groups
        self._elements: Final = elements
        self._level: Final = root_of(leaves // groups).level
        self._dither: Final = Dither(seed, groups)

    def begin(self, step: int, turn: int = 0) -> None:
        """Set the step, and the turn of it, of the next sum: they decide its random numbers."""
        self._dither.begin(step, turn)

    def adder_of(self, blocks: Sequence[Block]) -> Adder:
        """Return what adds up all blocks of the tree."""
        sums, exact = GroupSums(blocks, self._level), tree_adder(blocks)

        def add(vectors: Sequence[Vector], out: Vector, start: int) -> None:
            count = max(0, min(out.size, self._elements - start))
            with np.errstate(all="ignore"):
                for piece in pieces(start, start + count):
                    here = slice(piece.start - start, piece.stop - start)
                    self._add_up(sums, [vector[here] for vector in vectors], piece, out[here])
            exact([vector[count:] for vector in vectors], out[count:], start + count)

        return add

    def over_hosts(self, leaders: Backend, assignment: BlockAssignment) -> HostSum:
        """Return what adds up the blocks of several hosts; `leaders` are one rank of each."""
        blocks = assignment[leaders.rank]
        add_compressed = self._over_hosts(leaders, GroupSums(blocks, self._level), assignment)

        def add(vectors: Sequence[Vector], out: Vector, deadline: Deadline) -> None:
            rows = np.zeros((max(map(len, assignment)), out.size - self._elements), np.float32)
            for row, vector in zip(rows, vectors, strict=False):
                row[:] = vector[self._elements :]
            exact = MessageReducer(leaders, rows)
            with np.errstate(all="ignore"):
                add_compressed(vectors, out[: self._elements], deadline)
            out[self._elements :] = exact.all_reduce(
                assignment, timeout_seconds=deadline.left_seconds
            )

        return add

    @abstractmethod
    def _add_up(
        self, sums: GroupSums, vectors: Sequence[Vector], piece: slice, out: Vector
    ) -> None:
        """Write the sum of all groups of a piece into `out`."""

    @abstractmethod
    def _over_hosts(
        self, leaders: Backend, sums: GroupSums, assignment: BlockAssignment
    ) -> HostSum:
        """Return what does the same over hosts, for all elements that are compressed."""


class SharedScale(Compression):
    """int8: one byte an element, and one scale for a chunk; see `shared_scale`."""

    def __init__(self, *, leaves: int, groups: int, elements: int, seed: int) -> None:
        super().__init__(leaves=leaves, groups=groups, elements=elements, seed=seed)
        self._quantizer: Final = Quantizer(groups, self._dither)

    def _add_up(
        self, sums: GroupSums, vectors: Sequence[Vector], piece: slice, out: Vector
    ) -> None:
        rows, total = sums.of(vectors, slice(None)), np.empty(out.size, np.int8)
        scales = scales_of(maxima_of(rows, piece), self.groups)
        self._quantizer.add_up(piece, sums.groups, rows, scales, total)
        decode(total, scales, out)
        canonicalise(out)

    def _over_hosts(
        self, leaders: Backend, sums: GroupSums, _assignment: BlockAssignment
    ) -> HostSum:
        total, cuts = np.empty(self._elements, np.int8), list(pieces(0, self._elements))
        maxima = np.empty(chunks_of(slice(0, self._elements)).stop, np.float32)

        def add(vectors: Sequence[Vector], out: Vector, deadline: Deadline) -> None:
            for piece in cuts:
                maxima[chunks_of(piece)] = maxima_of(sums.of(vectors, piece), piece)
            all_reduce(leaders, maxima, "max", timeout_seconds=deadline.left_seconds)
            scales = scales_of(maxima, self.groups)
            for piece in cuts:
                rows, here = sums.of(vectors, piece), scales[chunks_of(piece)]
                self._quantizer.add_up(piece, sums.groups, rows, here, total[piece])
            all_reduce(leaders, total, timeout_seconds=deadline.left_seconds)
            for piece in cuts:
                decode(total[piece], scales[chunks_of(piece)], out[piece])
                canonicalise(out[piece])

        return add


class _Packed(Compression):
    """A kind whose nodes above the groups are sums of two packed nodes."""

    _dtype: ClassVar[type[np.generic]] = np.float32
    """Of what is sent."""

    @abstractmethod
    def _pack(self, row: Vector, piece: slice) -> Vector:
        """Return what counts of a group's sum in a piece, in new memory."""

    @abstractmethod
    def _size(self, piece: slice) -> int:
        """Return the length of that."""

    @abstractmethod
    def _unpack(self, packed: Vector, out: Vector, piece: slice) -> None:
        """Write the root's sum of a piece."""

    def _round(self, node: Vector) -> None:
        """Round a node above the groups, in place."""

    def _encode(self, node: Vector, out: NDArray[Any]) -> None:
        out[...] = node

    def _decode(self, sent: NDArray[Any], out: Vector) -> None:
        out[...] = sent

    def _add_up(
        self, sums: GroupSums, vectors: Sequence[Vector], piece: slice, out: Vector
    ) -> None:
        rows = [self._pack(row, piece) for row in sums.of(vectors, slice(None))]
        plan = plan_of([Block(0, group) for group in sums.groups])
        self._unpack(_climb(plan, rows, self._round), out, piece)

    def _over_hosts(
        self, leaders: Backend, sums: GroupSums, assignment: BlockAssignment
    ) -> HostSum:
        groups = [{block.start >> self._level for block in blocks} for blocks in assignment]
        nodes = [nodes_of(some) for some in groups]
        plans = [
            ([sums.groups.index(group) for group in range(node.start, node.stop)], _whole(node))
            for node in nodes[leaders.rank]
        ]
        cuts = list(pieces(0, self._elements))

        def add(vectors: Sequence[Vector], out: Vector, deadline: Deadline) -> None:
            stops = [0, *accumulate(map(self._size, cuts))]
            places = [slice(*ends) for ends in pairwise(stops)]
            sent = np.empty((max(map(len, nodes)), stops[-1]), self._dtype)
            for piece, place in zip(cuts, places, strict=True):
                rows = [self._pack(row, piece) for row in sums.of(vectors, piece)]
                for (numbers, plan), node in zip(plans, sent, strict=False):
                    found = _climb(plan, [rows[number] for number in numbers], self._round)
                    self._encode(found, node[place])
            reducer = MessageReducer(leaders, sent, self._adder)
            total = reducer.all_reduce(nodes, timeout_seconds=deadline.left_seconds)
            for piece, place in zip(cuts, places, strict=True):
                self._unpack(self._decoded(total[place]), out[piece], piece)

        return add

    def _adder(self, blocks: Sequence[Block]) -> Callable[..., None]:
        """Return what adds up packed nodes as they are sent."""
        plan = plan_of(blocks)

        def add(vectors: Sequence[NDArray[Any]], out: NDArray[Any], _start: int) -> None:
            for piece in pieces(0, out.size):
                rows = [self._decoded(vector[piece]) for vector in vectors]
                self._encode(_climb(plan, rows, self._round), out[piece])

        return add

    def _decoded(self, sent: NDArray[Any]) -> Vector:
        out = np.empty(sent.size, np.float32)
        self._decode(sent, out)
        return out


class BFloat16(_Packed):
    """Every node from the groups up is rounded to 16 bits."""

    _dtype = np.uint16

    def _pack(self, row: Vector, piece: slice) -> Vector:  # noqa: ARG002  all elements alike
        packed = row.copy()
        self._round(packed)
        return packed

    def _size(self, piece: slice) -> int:
        size: int = piece.stop - piece.start
        return size

    def _unpack(self, packed: Vector, out: Vector, piece: slice) -> None:  # noqa: ARG002  as above
        out[...] = packed
        canonicalise(out)

    def _round(self, node: Vector) -> None:
        half.round_bf16(node, node)

    def _encode(self, node: Vector, out: NDArray[Any]) -> None:
        half.encode_bf16(node, out)

    def _decode(self, sent: NDArray[Any], out: Vector) -> None:
        half.decode_bf16(sent, out)


class Float16(BFloat16):
    """The same with more bits for less: what is above 65,504 comes out as infinite."""

    def _round(self, node: Vector) -> None:
        half.round_fp16(node, node)

    def _encode(self, node: Vector, out: NDArray[Any]) -> None:
        half.encode_fp16(node, out)

    def _decode(self, sent: NDArray[Any], out: Vector) -> None:
        half.decode_fp16(sent, out)


class Sparse(_Packed):
    """random: in each sum some elements count, divided by their probability; the others are 0.

    Where a group's sum in a chunk is not finite, all of the chunk comes out as NaN, because the
    number that is not finite may be left out. A mark for each chunk, 0 or NaN, follows the
    elements of a piece.
    """

    def __init__(self, *, leaves: int, groups: int, elements: int, seed: int, ratio: float) -> None:
        super().__init__(leaves=leaves, groups=groups, elements=elements, seed=seed)
        self._ratio: Final = ratio
        self._chosen: Final[dict[tuple[int, int], NDArray[np.bool_]]] = {}

    def begin(self, step: int, turn: int = 0) -> None:
        super().begin(step, turn)
        self._chosen.clear()

    def _pack(self, row: Vector, piece: slice) -> Vector:
        return np.concatenate((row[self._choice(piece)], 0 * maxima_of([row], piece)))

    def _size(self, piece: slice) -> int:
        chunks = chunks_of(piece)
        count: int = chunks.stop - chunks.start
        return count + int(self._choice(piece).sum())

    def _unpack(self, packed: Vector, out: Vector, piece: slice) -> None:
        choice = self._choice(piece)
        kept, marks = np.split(packed, [int(choice.sum())])
        in_chunks(out)[:] = marks[:, None]
        out[choice] += kept / np.float32(self._ratio)
        canonicalise(out)

    def _choice(self, piece: slice) -> NDArray[np.bool_]:
        key = piece.start, piece.stop
        if key not in self._chosen:
            self._chosen[key] = self._dither.chosen(piece, self._ratio)
        return self._chosen[key]


KINDS: Final[Mapping[str, type[Compression]]] = {
    "int8": SharedScale,
    "bf16": BFloat16,
    "fp16": Float16,
    "random": Sparse,
}


def _whole(node: Block) -> Plan:
    return plan_of([Block(0, leaf) for leaf in range(node.size)])


def _climb(
    plan: Plan, rows: Sequence[Vector], after: Callable[[Vector], None] = lambda _node: None
) -> Vector:
    """Return the sum of all rows; `after` is called with each node above them."""
    new = [np.empty_like(rows[0]) for _ in range(plan.temporaries + bool(plan.additions))]
    buffers = [*rows, *new]
    for target, left, right in plan.additions:
        np.add(buffers[left], buffers[right], out=buffers[target])
        after(buffers[target])
    return buffers[len(rows)] if plan.additions else rows[0]
