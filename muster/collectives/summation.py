"""Evaluates the fixed tree over whatever blocks there are, in the order that never changes.

Which additions there are is decided once per set of blocks (`plan_of`, pure); they are carried out
(`add_up`) piece by piece, so that a partial sum is still in the second-level cache when the next
addition wants it. Nobody else adds gradients.
"""

import math
from collections.abc import Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Vector
from muster.collectives.tree import Block, root_of

PIECE_ELEMENTS: Final = 65_536
"""256 KB: an operand, another one and their sum fit in a megabyte of cache. Each element is summed
alone, so the size of a piece changes the speed and never a bit."""

NAN_BITS: Final = np.uint32(0x7FC00000)
"""The one NaN that comes out: sign and payload of a sum's NaN depend on the order of its operands
and on which instruction added them."""


class Addition(NamedTuple):
    """target = left + right, by the numbers of the buffers."""

    target: int
    left: int
    right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The additions that make the root of some blocks, each after those it needs.

    Buffer i is the i-th block, the next one is the result, and the ones after it are temporaries.
    A plan for the root itself has no additions.
    """

    blocks: tuple[Block, ...]
    additions: tuple[Addition, ...]
    temporaries: int


def plan_of(blocks: Sequence[Block]) -> Plan:
    """Return how to add up `blocks`, in any order, to the root of the tree.

    Raises ValueError unless together they are all leaves of a balanced tree, each once.
    """
    root = root_of(max((block.stop for block in blocks), default=0))
    numbers = {block: number for number, block in enumerate(blocks)}
    if sum(block.size for block in blocks) != root.size or len(numbers) != len(blocks):
        raise ValueError(f"{list(blocks)} are not the leaves of {root}, each once")
    result = len(blocks)
    additions = tuple(_additions(root, numbers, result))
    used = max((addition.target for addition in additions), default=result)
    return Plan(blocks=tuple(blocks), additions=additions, temporaries=used - result)


def add_up(plan: Plan, vectors: Sequence[Vector], out: Vector) -> None:
    """Write the root's sum of `vectors`, the plan's blocks in their order, into `out`.

    All have the length of `out`, which overlaps none of them; to sum a slice, pass slices. A NaN is
    written as 0x7fc00000. Takes up to the tree's depth of temporary pieces, no whole vector.
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
    """Do the same for one piece of a few pages at most; to be run in a `quiet_context`.

    `buffers` are numbered as the plan says: its blocks, the result, its temporaries.
    """
    for target, left, right in plan.additions:
        np.add(buffers[left], buffers[right], buffers[target])
    result = buffers[len(plan.blocks)]
    if not plan.additions:
        np.copyto(result, buffers[0])
    _canonicalise(result)


def quiet_context() -> Context:
    """Return where infinities and NaN are values of a sum, not accidents to be warned of.

    numpy keeps that in a context variable; to run in a context costs a tenth of `numpy.errstate`.
    """
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return context


def _canonicalise(piece: Vector) -> None:
    """The first NaN counts as the maximum: one cheap look at what is in the cache anyway."""
    if piece.size and math.isnan(piece[piece.argmax()]):
        piece.view(np.uint32)[np.isnan(piece)] = NAN_BITS


def _additions(node: Block, numbers: dict[Block, int], target: int) -> Iterator[Addition]:
    """Yield what puts the sum of `node` into `target`, or nothing if it is there already."""
    if node in numbers:
        return
    if node.level == 0:
        raise ValueError(f"leaf {node.number} is below none of the blocks, or below two")
    left, right = node.halves
    yield from _additions(left, numbers, target)
    # What the left half left in `target` has to survive the right half.
    free = target if left in numbers else target + 1
    yield from _additions(right, numbers, free)
    yield Addition(target, numbers.get(left, target), numbers.get(right, free))
