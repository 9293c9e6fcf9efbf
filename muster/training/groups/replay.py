"""Computes one leaf in N on a second rank as well and compares the two results.

A step whose leaf differs is not committed. All ranks then compute the leaf once more: a rank whose
result differs from the majority (a flipped bit, a faulty processor) is removed. A program that
depends on a clock, its own randomness or earlier calls differs every time and is refused.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from muster.collectives.backend import Backend
from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.tree import Block, BlockAssignment, isolate
from muster.program import InvalidProgram, State
from muster.training.blocks import STOP_REQUESTS, Computer, Tasks
from muster.training.groups.group import WorkersDiverged, divergent_members, gather_values


class Replay:
    """Chooses the leaves that are computed twice, and compares the results."""

    def __init__(self, computer: Computer, every: int | None) -> None:
        """`every`: one leaf in this many, counted over all steps; None disables the replay."""
        self._computer: Final = computer
        self._every: Final = every
        self._recomputed: Final = np.empty(computer.elements if every else 0, np.float32)

    def leaves(self, step: int) -> list[int]:
        """Return the leaves of a step that are computed twice, the same on every rank."""
        if self._every is None:
            return []
        # Leaves are numbered over all steps; the multiples of `every` are compared.
        first = -step * self._computer.schedule.virtual_shards % self._every
        return list(range(first, self._computer.schedule.virtual_shards, self._every))

    def split(
        self, assignment: BlockAssignment, step: int, held: BlockAssignment = ()
    ) -> BlockAssignment:
        """Return the same assignment with a block of its own for each leaf that is compared.

        Blocks in `held`, the first of each rank, are already summed and stay as they are.
        """
        leaves = self.leaves(step)
        summed = {block for blocks in held for block in blocks}
        # Tuples, which a reducer compares with those that it has prepared for.
        return [
            tuple(part for b in blocks for part in ([b] if b in summed else isolate(b, leaves)))
            for blocks in assignment
        ]

    def check(
        self,
        backend: Backend,
        state: State,
        step: int,
        assignment: BlockAssignment,
        slots: NDArray[np.float32],
    ) -> Tasks[None]:
        """Compare leaves of a step that is summed and not committed; all ranks call this.

        Raises `WorkersDiverged`, and `InvalidProgram` for a program that is not deterministic.
        """
        for leaf in self.leaves(step):
            block = Block(0, leaf)
            owner = next((rank for rank, blocks in enumerate(assignment) if block in blocks), None)
            if owner is None:
                continue  # part of a larger sum that was computed in an earlier group
            first = second = ""
            if backend.rank == owner:
                first = _digest(slots[list(assignment[owner]).index(block)])
            # In a group of one the owner checks itself.
            if backend.rank == (owner + 1) % backend.world_size:
                second = yield from self._compute(state, step, leaf)
            answers = gather_values(backend, (first, second), tuple[str, str])
            if len({digest for answer in answers for digest in answer if digest}) > 1:
                yield from self._resolve(backend, state, step, leaf, first or second)

    def _resolve(
        self, backend: Backend, state: State, step: int, leaf: int, before: str
    ) -> Tasks[None]:
        """Recompute the leaf on every rank and find the ranks that differ from the majority."""
        again = yield from self._compute(state, step, leaf)
        answers = gather_values(backend, (before, again), tuple[str, str])
        recomputed = [digest for _, digest in answers]
        divergent = set(divergent_members(recomputed))
        right = next(digest for peer, digest in enumerate(recomputed) if peer not in divergent)
        # Also a rank that was wrong before and is right now: faults of a machine come and go.
        divergent |= {peer for peer, (digest, _) in enumerate(answers) if digest not in {"", right}}
        # No two alike, or no rank right both times: it is the program and not a machine.
        if len(set(recomputed)) == len(recomputed) or len(divergent) == len(answers):
            raise InvalidProgram(
                f"the gradient of virtual shard {leaf} in step {step} came out differently when it "
                "was computed again: gradient() may depend on its arguments alone, so look for a "
                "clock, randomness other than its generator, or state it keeps between calls"
            )
        raise WorkersDiverged(
            f"virtual shard {leaf} of step {step} was computed differently by {len(divergent)} of "
            f"{len(answers)} workers: stopped before the step is taken",
            sorted(divergent),
            backend.rank,
        )

    def _compute(self, state: State, step: int, leaf: int) -> Tasks[str]:
        out = self._recomputed
        yield from self._computer.sum_up(Block(0, leaf), state, step, out, is_again=True)
        return _digest(self._recomputed)


def _digest(vector: Vector) -> str:
    return xxh3_128_hexdigest(
        vector[:STOP_REQUESTS].data
    )  # that one is of the rank, not of the leaf
