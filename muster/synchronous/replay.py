"""One leaf in so many is computed by a second rank as well, and the two are compared.

A step whose leaf came out differently is not committed. Memory that flipped a bit and processors
that compute wrongly are found by asking everybody once more: who is alone with its answer leaves. A
program that looks at a clock, at randomness of its own or at what it was called with before answers
differently every time, and is refused.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from muster.collectives.backend import Backend, Vector
from muster.collectives.tree import Block, Deal, isolate
from muster.program import InvalidProgram, State
from muster.synchronous.gathering import gather
from muster.synchronous.shares import Shares
from muster.synchronous.taking_up import Differs, odd_ones


class Replay:
    """Decides which leaves are computed twice, and holds the answers against each other."""

    def __init__(self, shares: Shares, every: int | None) -> None:
        """`every`: one leaf in so many, counted over all steps; None: no leaf at all."""
        self._shares: Final = shares
        self._every: Final = every
        self._again: Final = np.empty(shares.elements if every else 0, np.float32)

    def leaves(self, step: int) -> list[int]:
        """Return the leaves of a step that are computed twice, the same on every rank."""
        if self._every is None:
            return []
        first = -step * self._shares.course.virtual_shards % self._every
        return list(range(first, self._shares.course.virtual_shards, self._every))

    def deal(self, dealt: Deal, step: int, held: Deal = ()) -> Deal:
        """Return the same shares, with a slot of its own for each leaf that is compared.

        Blocks that are `held`, the first of each share, are summed already and stay as they are.
        """
        leaves = self.leaves(step)
        done = {block for blocks in held for block in blocks}
        return [
            [part for b in mine for part in ([b] if b in done else isolate(b, leaves))]
            for mine in dealt
        ]

    def check(
        self, backend: Backend, state: State, step: int, dealt: Deal, slots: NDArray[np.float32]
    ) -> None:
        """Compare the leaves of a step that is summed and not committed; all ranks call this.

        Raises `Differs`, and `InvalidProgram` for a program that contradicts itself.
        """
        for leaf in self.leaves(step):
            owner = next((rank for rank, mine in enumerate(dealt) if Block(0, leaf) in mine), None)
            if owner is None:
                continue  # within a sum from before the layout changed
            first = second = ""
            if backend.rank == owner:
                first = _digest(slots[list(dealt[owner]).index(Block(0, leaf))])
            # Where there is nobody else, one is one's own witness.
            if backend.rank == (owner + 1) % backend.world_size:
                second = self._compute(state, step, leaf)
            answers = gather(backend, (first, second), tuple[str, str])
            if len({answer for told in answers for answer in told if answer}) > 1:
                self._resolve(backend, state, step, leaf, first or second)

    def _resolve(self, backend: Backend, state: State, step: int, leaf: int, said: str) -> None:
        """Ask everybody once more, and find who is alone with its answer."""
        anew = self._compute(state, step, leaf)
        told = gather(backend, (said, anew), tuple[str, str])
        fresh = [answer for _, answer in told]
        odd = set(odd_ones(fresh))
        right = next(answer for place, answer in enumerate(fresh) if place not in odd)
        odd |= {place for place, (first, _) in enumerate(told) if first not in {"", right}}
        if len(set(fresh)) == len(fresh) or len(odd) == len(told):
            raise InvalidProgram(
                f"the gradient of virtual shard {leaf} in step {step} came out differently when it "
                "was computed again: gradient() may depend on its arguments alone, so look for a "
                "clock, randomness other than its generator, or state it keeps between calls"
            )
        raise Differs(
            f"virtual shard {leaf} of step {step} was computed differently by {len(odd)} of "
            f"{len(told)} workers: stopped before the step is taken",
            sorted(odd),
            backend.rank,
        )

    def _compute(self, state: State, step: int, leaf: int) -> str:
        self._shares.write(Block(0, leaf), state, step, self._again)
        return _digest(self._again)


def _digest(vector: Vector) -> str:
    return xxh3_128_hexdigest(vector.data)
