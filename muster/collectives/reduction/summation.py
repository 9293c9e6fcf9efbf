"""Evaluates the fixed tree over any set of blocks, always in the same order.

`plan_of` decides the additions once per set of blocks and is pure. `add_up` carries them out piece
by piece, so that a partial sum is still in the second-level cache for the next addition. All sums
of gradients across blocks go through here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.tree import Block, root_of

PIECE_ELEMENTS: Final = 65_536
"""256 KB: an operand, another one and their sum fit in a megabyte of cache. Each element is summed
alone, so the size of a piece changes the speed and never a bit."""

NAN_BITS: Final = np.uint32(0x7FC00000)
"""The canonical NaN of a result. Sign and payload of a computed NaN depend on operand order and on
the instruction used."""


Adder: TypeAlias = Callable[[Sequence[Vector], Vector, int], None]
"""Writes the sum of vectors, of fixed blocks in their order, into a slice of the result; the last
argument is the element with which that begins."""

AdderOf: TypeAlias = Callable[[Sequence[Block]], Adder]


class Addition(NamedTuple):
    """target = left + right, as buffer numbers."""

    target: int
    left: int
    right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The additions that sum blocks to the root, in dependency order.

    Buffer i is the i-th block, the next one is the result, and the ones after it are temporaries.
    A plan for the root itself has no additions.
    """

    blocks: tuple[Block, ...]
    additions: tuple[Addition, ...]
    temporaries: int


def plan_of(blocks: Sequence[Block]) -> Plan:
    """Return the plan that sums `blocks`, given in any order, to the root of the tree.

    Raises ValueError unless together they are all leaves of a balanced tree, each once.
    """
    root = root_of(max((block.stop for block in blocks), default=0))
    numbers = {block: number for number, block in enumerate(blocks)}
    # A gap and an overlap may add up to the right size: `_additions` finds the gap.
    if sum(block.size for block in blocks) != root.size or len(numbers) != len(blocks):
        raise ValueError(f"{list(blocks)} are not the leaves of {root}, each once")
    result = len(blocks)
    additions = tuple(_additions(root, numbers, result))
    used = max((addition.target for addition in additions), default=result)
    return Plan(blocks=tuple(blocks), additions=additions, temporaries=used - result)


def tree_adder(blocks: Sequence[Block]) -> Adder:
    """Return what adds up vectors of these blocks as they are; raises ValueError as `plan_of`."""
    plan = plan_of(blocks)
    return lambda vectors, out, _start: add_up(plan, vectors, out)


def add_up(plan: Plan, vectors: Sequence[Vector], out: Vector) -> None:
    """Write the root's sum of `vectors`, the plan's blocks in their order, into `out`.

    All have the length of `out`, which overlaps none of them. A NaN is written as 0x7fc00000. Uses
    temporary pieces up to the depth of the tree, never a whole vector.
    """
    scratch = np.empty((plan.temporaries, min(PIECE_ELEMENTS, out.size)), np.float32)
    quiet_context().run(_add_pieces, plan, vectors, out, scratch)


def _add_pieces(
    plan: Plan, vectors: Sequence[Vector], out: Vector, scratch: NDArray[np.float32]
) -> None:
    for start in range(0, out.size, PIECE_ELEMENTS):
        piece = out[start : start + PIECE_ELEMENTS]
        operands = [vector[start : start + PIECE_ELEMENTS] for vector in vectors]
        add_piece(plan, [*operands, piece, *scratch[:, : piece.size]])


def add_piece(plan: Plan, buffers: Sequence[Vector]) -> None:
    """Do the same for one piece; run it in a `quiet_context`.

    `buffers` are numbered as the plan says: its blocks, the result, its temporaries.
    """
    for target, left, right in plan.additions:
        np.add(buffers[left], buffers[right], buffers[target])
    result = buffers[len(plan.blocks)]
    if not plan.additions:
        np.copyto(result, buffers[0])
    canonicalise(result)


def quiet_context() -> Context:
    """Return a context in which numpy does not warn about infinities and NaN.

    Running in a context costs a tenth of `numpy.errstate`.
    """
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return context


def canonicalise(piece: Vector) -> None:
    """Replace NaN by `NAN_BITS`. argmax returns a NaN if there is one: one pass in the cache."""
    if piece.size and math.isnan(piece[piece.argmax()]):
        piece.view(np.uint32)[np.isnan(piece)] = NAN_BITS


def _additions(node: Block, numbers: dict[Block, int], target: int) -> Iterator[Addition]:
    """Yield the additions that put the sum of `node` into `target`; none if it is a block."""
    if node in numbers:
        return
    if node.level == 0:
        raise ValueError(f"leaf {node.number} is below none of the blocks, or below two")
    left, right = node.halves
    yield from _additions(left, numbers, target)
    # The right half must not overwrite the left half's sum in `target`.
    free = target if left in numbers else target + 1
    yield from _additions(right, numbers, free)
    yield Addition(target, numbers.get(left, target), numbers.get(right, free))
