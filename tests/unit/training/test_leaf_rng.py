import numpy as np

from muster.training.blocks import LeafRng
from muster.training.schema import Leaf
from tests.support.plain_training import random_of

LEAVES = [(epoch, Leaf(step, shard)) for epoch in (0, 3) for step in (0, 9) for shard in (0, 31)]


def drawn(random: np.random.Generator) -> bytes:
    parts = (random.normal(size=5), random.integers(0, 7, 3, np.uint32), random.random(2))
    return b"".join(part.tobytes() for part in parts)


def test_a_leaf_meets_the_numbers_of_a_generator_made_for_it() -> None:
    chance = LeafRng(2**63 - 1)
    for epoch, leaf in LEAVES:
        assert drawn(chance.at(epoch, leaf)) == drawn(random_of(2**63 - 1, epoch, leaf))


def test_what_was_drawn_before_leaves_no_trace() -> None:
    chance = LeafRng(1)
    first = drawn(chance.at(0, Leaf(4, 2)))
    chance.at(0, Leaf(4, 3)).integers(0, 7, dtype=np.uint32)  # keeps the other half of a word
    assert drawn(chance.at(0, Leaf(4, 2))) == first


def test_every_leaf_of_every_seed_has_numbers_of_its_own() -> None:
    seen = {drawn(LeafRng(seed).at(epoch, leaf)) for seed in range(4) for epoch, leaf in LEAVES}
    assert len(seen) == 4 * len(LEAVES)
