"""Sums that are compressed from the level of groups up, with the same bits for every assignment.

The leaves are cut into equal subtrees, the *groups*, whose number is part of the numerics. A
group's sum is that of the float32 tree. What is sent, and what a host adds up, are functions of the
groups' sums alone, not of the ranks and hosts that have them. The last elements of a vector, which
hold loss, weight, metrics and counts, are summed as they are.

What one host adds up alone has the bits of what several do: see `adder_of` and `sum_hosts`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Backend
from muster.collectives.compression import half
from muster.collectives.compression.exchange import ring_bytes
from muster.collectives.compression.shared_scale import (
    Dither,
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
from muster.collectives.reduction.summation import Adder, Plan, canonicalise, plan_of, tree_adder
from muster.collectives.reduction.tree import Block, BlockAssignment, nodes_of, root_of

Rows: TypeAlias = Sequence[Vector]
Convert: TypeAlias = Callable[[NDArray[Any], NDArray[Any]], object]
"""Writes the first, in another form, into the second."""


def _copy(numbers: NDArray[Any], out: NDArray[Any]) -> None:
    np.copyto(out, numbers)


class GroupSums:
    """Adds up the groups of which a host has all blocks."""

    def __init__(self, blocks: Sequence[Block], level: int) -> None:
        """`level` is that of groups, and no block is above one. Raises ValueError as `plan_of`."""
        places: dict[int, list[int]] = {}
        for place, block in enumerate(blocks):
            places.setdefault(block.start >> level, []).append(place)
        self._places: Final = [places[group] for group in sorted(places)]
        self._plans: Final = [
            plan_of([blocks[place].below(level) for place in some]) for some in self._places
        ]
        self.groups: Final = sorted(places)

    def of(self, vectors: Rows, piece: slice = slice(None)) -> list[Vector]:
        """Return the sum of each group, read-only."""
        parts = zip(self._plans, self._places, strict=True)
        return [_climb(plan, [vectors[place][piece] for place in some]) for plan, some in parts]


class _Stopwatch:
    """Adds up how long its bodies take."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Compression(ABC):
    """One kind of compression in one job; all ranks have the same."""

    def __init__(
        self, leaves: int, groups: int, elements: int, seed: int, ratio: float = 1.0
    ) -> None:
        """The first `elements` of each vector are compressed. `ratio` is for `Sparse` alone."""
        self.groups: Final = root_of(groups).size
        self._elements: Final = elements
        self._level: Final = root_of(leaves // groups).level
        self._ratio: Final = np.float32(ratio)
        self._dither: Final = Dither(seed, groups)
        self._coding: Final = _Stopwatch()  # what the sum without compression does, too, is outside
        self._bytes_before = self._bytes_after = 0

    def begin(self, step: int, turn: int = 0) -> None:
        """Set the step, and the turn of it, of the next sum: they decide its random numbers."""
        self._dither.begin(step, turn)
        if turn == 0:
            self._bytes_before = self._bytes_after = 0
            self._coding.seconds = 0.0

    def costs(self) -> dict[str, float]:
        """Return what this rank sent to other hosts in this step, and how long it took to encode.

        The names are those of `counters`. Nothing is sent where all leaves lie on one host.
        """
        before, after = self._bytes_before, self._bytes_after
        return {
            "compression.bytes_before": before,
            "compression.bytes_after": after,
            "compression.ratio": after / before if before else 1.0,
            "compression.duration_ms": self._coding.seconds * 1e3,
        }

    def adder_of(self, blocks: Sequence[Block]) -> Adder:
        """Return what adds up all blocks of the tree."""
        sums, exact = GroupSums(blocks, self._level), tree_adder(blocks)

        def add(vectors: Rows, out: Vector, start: int) -> None:
            end = max(0, min(out.size, self._elements - start))
            with np.errstate(all="ignore"):
                for piece in pieces(start, start + end):
                    here = slice(piece.start - start, piece.stop - start)
                    self._add_up(sums, [vector[here] for vector in vectors], piece, out[here])
            exact([vector[end:] for vector in vectors], out[end:], start + end)

        return add

    def sum_hosts(
        self, leaders: Backend, blocks: BlockAssignment, rows: Rows, out: Vector, deadline: Deadline
    ) -> None:
        """Write the sum over several hosts into `out`; `leaders` are one rank of each.

        `blocks` are those of each host, `rows` the vectors of this one's.
        """
        most, end = max(map(len, blocks)), self._elements
        sent_before = leaders.counters()["network.bytes_sent"]
        exact = np.zeros((most, out.size - end), np.float32)
        for row, vector in zip(exact, rows, strict=False):
            row[:] = vector[end:]
        reducer = MessageReducer(leaders, exact)
        out[end:] = reducer.all_reduce(blocks, timeout_seconds=deadline.left_seconds)
        with np.errstate(all="ignore"):
            self._sum_hosts(leaders, blocks, rows, out[:end], deadline)
        self._bytes_before += ring_bytes(out, leaders)
        self._bytes_after += int(leaders.counters()["network.bytes_sent"] - sent_before)

    @abstractmethod
    def _add_up(self, sums: GroupSums, vectors: Rows, piece: slice, out: Vector) -> None:
        """Write the sum of all groups of a piece into `out`."""

    @abstractmethod
    def _sum_hosts(
        self, leaders: Backend, blocks: BlockAssignment, rows: Rows, out: Vector, deadline: Deadline
    ) -> None:
        """Do what `sum_hosts` does for the elements that are compressed."""


class SharedScale(Compression):
    """int8: one byte an element, and one scale for a chunk; see `shared_scale`."""

    def _add_up(self, sums: GroupSums, vectors: Rows, piece: slice, out: Vector) -> None:
        rows = sums.of(vectors)
        with self._coding:
            scales = scales_of(maxima_of(rows, piece), self.groups)
            decode(self._dither.quantize(piece, sums.groups, rows, scales), scales, out)
            canonicalise(out)

    def _sum_hosts(
        self, leaders: Backend, blocks: BlockAssignment, rows: Rows, out: Vector, deadline: Deadline
    ) -> None:
        sums, cuts = GroupSums(blocks[leaders.rank], self._level), [*pieces(0, out.size)]
        with self._coding:  # with the groups' sums, which are needed twice for this kind alone
            maxima = np.concatenate([maxima_of(sums.of(rows, piece), piece) for piece in cuts])
        all_reduce(leaders, maxima, "max", timeout_seconds=deadline.left_seconds)
        scales, total = scales_of(maxima, self.groups), np.empty(out.size, np.int8)
        for piece in cuts:
            found, own = sums.of(rows, piece), scales[chunks_of(piece)]
            with self._coding:
                total[piece] = self._dither.quantize(piece, sums.groups, found, own)
        all_reduce(leaders, total, timeout_seconds=deadline.left_seconds)
        with self._coding:
            for piece in cuts:
                decode(total[piece], scales[chunks_of(piece)], out[piece])
                canonicalise(out[piece])


class BFloat16(Compression):
    """Every node from the groups up is rounded to 16 bits, and sent so."""

    _dtype: type[np.generic] = np.uint16
    _round: Convert = staticmethod(half.round_bf16)
    _encode: Convert = staticmethod(half.encode_bf16)
    _decode: Convert = staticmethod(half.decode_bf16)

    def _size(self, piece: slice) -> int:
        """Return how many numbers are packed of a piece."""
        return int(piece.stop - piece.start)

    def _pack(self, row: Vector, piece: slice) -> Vector:  # noqa: ARG002  all alike
        """Return what counts of a group's sum in a piece."""
        packed = np.empty_like(row)
        self._round(row, packed)
        return packed

    def _unpack(self, packed: Vector, piece: slice, out: Vector) -> None:  # noqa: ARG002  all alike
        """Write the root's sum of a piece."""
        np.copyto(out, packed)

    def _add_up(self, sums: GroupSums, vectors: Rows, piece: slice, out: Vector) -> None:
        plan, rows = plan_of([Block(0, group) for group in sums.groups]), sums.of(vectors)
        with self._coding:
            packed = [self._pack(row, piece) for row in rows]
            self._unpack(_climb(plan, packed, self._round), piece, out)
            canonicalise(out)

    def _sum_hosts(
        self, leaders: Backend, blocks: BlockAssignment, rows: Rows, out: Vector, deadline: Deadline
    ) -> None:
        sums, cuts = GroupSums(blocks[leaders.rank], self._level), [*pieces(0, out.size)]
        nodes = [nodes_of({block.start >> self._level for block in some}) for some in blocks]
        places = [slice(*ends) for ends in pairwise([0, *accumulate(map(self._size, cuts))])]
        sent = np.empty((max(map(len, nodes)), places[-1].stop), self._dtype)
        for piece, place in zip(cuts, places, strict=True):
            packed = dict(zip(sums.groups, sums.of(rows, piece), strict=True))
            with self._coding:
                for node, row in zip(nodes[leaders.rank], sent, strict=False):
                    groups = range(node.start, node.stop)
                    parts = [self._pack(packed[group], piece) for group in groups]
                    plan = plan_of([Block(0, leaf) for leaf in range(node.size)])
                    self._encode(_climb(plan, parts, self._round), row[place])
        reducer = MessageReducer(leaders, sent, self._packed_adder)
        total = reducer.all_reduce(nodes, timeout_seconds=deadline.left_seconds)
        with self._coding:
            for piece, place in zip(cuts, places, strict=True):
                self._unpack(self._decoded(total[place]), piece, out[piece])
                canonicalise(out[piece])

    def _packed_adder(self, blocks: Sequence[Block]) -> Adder:
        """Return what adds up nodes as they are sent."""
        plan = plan_of(blocks)

        def add(vectors: Sequence[NDArray[Any]], out: NDArray[Any], _start: int) -> None:
            with self._coding:
                for piece in pieces(0, out.size):
                    rows = [self._decoded(vector[piece]) for vector in vectors]
                    self._encode(_climb(plan, rows, self._round), out[piece])

        return add

    def _decoded(self, sent: NDArray[Any]) -> Vector:
        out = np.empty(sent.size, np.float32)
        self._decode(sent, out)
        return out


class Float16(BFloat16):
    """The same with more bits for less: what is above 65,504 comes out as infinite."""

    _round = staticmethod(half.round_fp16)
    _encode = staticmethod(half.encode_fp16)
    _decode = staticmethod(half.decode_fp16)


class Sparse(BFloat16):
    """random: in each sum some elements count, divided by their probability; the others are 0.

    Where a group's sum in a chunk is not finite, all of the chunk comes out as NaN, because the
    number that is not finite may be left out. A mark for each chunk, 0 or NaN, follows the
    elements of a piece.
    """

    _dtype = np.float32
    _round = _encode = _decode = staticmethod(_copy)

    def _size(self, piece: slice) -> int:
        chunks = chunks_of(piece)
        return int(self._chosen(piece).sum() + chunks.stop - chunks.start)

    def _pack(self, row: Vector, piece: slice) -> Vector:
        return np.concatenate((row[self._chosen(piece)], 0 * maxima_of([row], piece)))

    def _unpack(self, packed: Vector, piece: slice, out: Vector) -> None:
        chosen = self._chosen(piece)
        kept, marks = np.split(packed, [int(chosen.sum())])
        in_chunks(out)[:] = marks[:, None]
        out[chosen] += kept / self._ratio

    def _chosen(self, piece: slice) -> NDArray[np.bool_]:
        return self._dither.chosen(piece, float(self._ratio))


KINDS: Final[Mapping[str, type[Compression]]] = {
    "int8": SharedScale,
    "bf16": BFloat16,
    "fp16": Float16,
    "random": Sparse,
}


def _climb(plan: Plan, rows: Rows, after: Convert = lambda _node, _out: None) -> Vector:
    """Return the sum of all rows; `after` rounds each node above them, in place."""
    new = [np.empty_like(rows[0]) for _ in range(plan.temporaries + bool(plan.additions))]
    buffers = [*rows, *new]
    for target, left, right in plan.additions:
        np.add(buffers[left], buffers[right], out=buffers[target])
        after(buffers[target], buffers[target])
    return buffers[len(rows)] if plan.additions else rows[0]
