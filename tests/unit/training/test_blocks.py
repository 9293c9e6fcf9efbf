"""What a rank adds to a sum: the same bits for every cut of the tree, however often."""

from collections.abc import Iterator

import numpy as np
import pytest

from muster.collectives.reduction.tree import Block, blocks_of_range
from muster.datasets.random_access import RandomAccess
from muster.datasets.sources import open_source
from muster.program import Batch, Contribution, InvalidProgram, ProgramRaised, State
from muster.training.blocks import BlockComputer, BusyFlag, LeafRng
from muster.training.sample_count import COUNT_ELEMENTS, decode_sample_count
from muster.training.schema import Leaf
from tests.support.plain_training import random_of
from tests.support.small_shares import LEAVES, SAMPLES, computer_of
from tests.support.stage import FEATURES, Regression, write_samples


@pytest.fixture(scope="module")
def drawer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RandomAccess]:
    shards = open_source(write_samples(tmp_path_factory.mktemp("data"), SAMPLES))
    with RandomAccess(shards) as drawer:
        yield drawer


class KeepsItsArrays(Regression):
    """Its gradients may not be overwritten."""

    def __init__(self) -> None:
        self.last: np.ndarray | None = None

    def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
        contribution = super().gradient(state, batch, random)
        if self.last is None:
            self.last = contribution.gradients["weights"]
        np.copyto(self.last, contribution.gradients["weights"])
        return Contribution({"weights": self.last}, contribution.loss, contribution.metrics)


def sum_of(computer: BlockComputer, block: Block, step: int) -> np.ndarray:
    out = np.full(computer.elements, np.nan, np.float32)
    computer.run(computer.sum_up(block, Regression().initial(3), step, out))
    return out


def test_block_is_the_sum_of_its_halves(drawer: RandomAccess) -> None:
    computer = computer_of(drawer)

    def by_halves(block: Block) -> np.ndarray:
        if block.level == 0:
            return sum_of(computer, block, step=1)
        left, right = block.halves
        return by_halves(left) + by_halves(right)

    root = Block(3, 0)
    assert sum_of(computer, root, step=1).tobytes() == by_halves(root).tobytes()


class Interrupted(Exception):
    """Raised by a check."""


@pytest.mark.parametrize("program", [Regression(), KeepsItsArrays()])
@pytest.mark.parametrize("leaves", range(LEAVES))
def test_finished_parts_of_a_block_are_kept(
    leaves: int, program: Regression, drawer: RandomAccess
) -> None:
    computer, checks = computer_of(drawer, program), iter(range(leaves))
    slots = np.full((LEAVES, computer.elements), np.nan, np.float32)

    def check() -> None:
        if next(checks, None) is None:
            raise Interrupted

    with pytest.raises(Interrupted):
        computer.run(computer.sum_up(Block(3, 0), program.initial(3), 1, slots[0], check))
    parts = computer.run(computer.take_finished(slots))
    assert parts == list(blocks_of_range(0, leaves))
    for part, slot in zip(parts, slots, strict=False):
        assert slot.tobytes() == sum_of(computer_of(drawer), part, step=1).tobytes()


def test_leaf_has_the_same_bits_every_time(drawer: RandomAccess) -> None:
    leaf = Block(0, 5)
    computer = computer_of(drawer)
    first = sum_of(computer, leaf, step=2)
    sum_of(computer, Block(3, 0), step=6)
    assert sum_of(computer, leaf, step=2).tobytes() == first.tobytes()
    assert sum_of(computer_of(drawer), leaf, step=2).tobytes() == first.tobytes()


def test_leaves_and_epochs_differ(drawer: RandomAccess) -> None:
    computer = computer_of(drawer)
    leaves = {
        sum_of(computer, Block(0, n), step).tobytes() for n in range(LEAVES) for step in (0, 4)
    }
    assert len(leaves) == 2 * LEAVES


def test_epoch_reads_every_sample_once(drawer: RandomAccess) -> None:
    computer = computer_of(drawer)
    read = [
        decode_sample_count(sum_of(computer, Block(3, 0), step)[-1 - COUNT_ELEMENTS : -1])
        for step in range(computer.schedule.steps_per_epoch)
    ]
    assert [one.lines for one in read] == [16, 16, 16, 2]
    assert sum(one.hash_sum for one in read) % 2**64 == drawer.totals.hash_sum


def updated(computer: BlockComputer, state: State) -> dict[str, np.ndarray]:
    """Return what one update makes of a state, in memory beside it."""
    target = {name: np.empty_like(array) for name, array in state.items()}
    computer.update(state, {"weights": np.ones(5, np.float32)}, 0, target)
    return target


def test_update_writes_only_the_target(drawer: RandomAccess) -> None:
    computer = computer_of(drawer)
    state = Regression().initial(3)
    before = {name: array.copy() for name, array in state.items()}
    after = updated(computer, state)
    assert not any(np.shares_memory(after[name], state[name]) for name in state)
    assert all((state[name] == before[name]).all() for name in state)
    assert (after["weights"] != state["weights"]).any()


class Meddling(Regression):
    """Writes to what it was given."""

    def update(self, state: State, gradients: State, step: int) -> dict[str, np.ndarray]:
        state["weights"][:] = 0
        return super().update(state, gradients, step)


class Growing(Regression):
    """Returns another shape than it was given."""

    def update(self, state: State, gradients: State, step: int) -> dict[str, np.ndarray]:
        after = super().update(state, gradients, step)
        return {**after, "weights": np.append(after["weights"], np.float32(1))}


def test_update_cannot_write_to_the_state(drawer: RandomAccess) -> None:
    program = Meddling()
    state = program.initial(3)
    with pytest.raises(ProgramRaised, match=r"at step 0: .*ValueError: .*read-only") as caught:
        updated(computer_of(drawer, program), state)
    assert caught.value.step == 0


def test_update_to_another_shape_is_refused(drawer: RandomAccess) -> None:
    program = Growing()
    with pytest.raises(InvalidProgram, match="weights"):
        updated(computer_of(drawer, program), program.initial(3))


class Watched(Regression):
    """Notes whether it is known to be at busy, and fails in its last method."""

    def __init__(self) -> None:
        self.busy = BusyFlag()
        self.seen: list[bool] = []

    def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
        self.seen.append(self.busy.is_set)
        return super().gradient(state, batch, random)

    def update(self, _state: State, _gradients: State, _step: int) -> State:
        self.seen.append(self.busy.is_set)
        raise ValueError("in vain")


def test_rank_is_busy_while_its_program_computes(
    drawer: RandomAccess,
) -> None:
    program = Watched()
    assert not program.busy.is_set
    computer = computer_of(drawer, program, program.busy)
    program.seen.clear()
    sum_of(computer, Block(0, 0), step=0)
    assert not program.busy.is_set
    with pytest.raises(ProgramRaised, match="in vain"):
        computer.update({}, {}, 0, {})
    assert not program.busy.is_set
    assert program.seen == [True, True]


RNG_LEAVES = [
    (epoch, Leaf(step, shard)) for epoch in (0, 3) for step in (0, 9) for shard in (0, 31)
]


def drawn(random: np.random.Generator) -> bytes:
    parts = (random.normal(size=5), random.integers(0, 7, 3, np.uint32), random.random(2))
    return b"".join(part.tobytes() for part in parts)


def test_leaf_numbers_are_those_of_its_own_generator() -> None:
    chance = LeafRng(2**63 - 1)
    for epoch, leaf in RNG_LEAVES:
        assert drawn(chance.at(epoch, leaf)) == drawn(random_of(2**63 - 1, epoch, leaf))


def test_earlier_draws_leave_no_trace() -> None:
    chance = LeafRng(1)
    first = drawn(chance.at(0, Leaf(4, 2)))
    chance.at(0, Leaf(4, 3)).integers(0, 7, dtype=np.uint32)  # keeps the other half of a word
    assert drawn(chance.at(0, Leaf(4, 2))) == first


def test_leaves_and_seeds_have_different_numbers() -> None:
    seen = {drawn(LeafRng(seed).at(epoch, leaf)) for seed in range(4) for epoch, leaf in RNG_LEAVES}
    assert len(seen) == 4 * len(RNG_LEAVES)


WRONG = 5
"""The shard that goes wrong, in step 1."""


class Wrong:
    """Knows where it is by its random numbers."""

    def __init__(self, **changes: object) -> None:
        self.changes = changes
        self.good = Regression()
        self.initial = self.good.initial
        self.update = self.good.update

    def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
        place = random.bit_generator.state["state"]["counter"].tolist()
        good = self.good.gradient(state, batch, random)
        if place[2:] != [1, WRONG]:
            return good
        gradients = {"weights": self.changes.get("weights", good.gradients["weights"])}
        metrics = {"bias": self.changes.get("metric", 0.0)}
        return Contribution(gradients, self.changes.get("loss", good.loss), metrics)  # type: ignore[arg-type]


class Tensor:
    """One of torch that still has its graph."""

    def numpy(self, *_: object) -> np.ndarray:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad")

    __array__ = __float__ = numpy


BAD = [
    ({"weights": Tensor()}, r"'weights' .* is a Tensor \(call .numpy\(\) on it\): expected"),
    ({"loss": Tensor()}, "the loss or a metric .* is not a number: Can't call numpy"),
    ({"weights": np.full(FEATURES, np.nan, np.float32)}, "the gradient 'weights' .* not finite"),
    ({"weights": np.full(FEATURES, np.inf, np.float32)}, "the gradient 'weights' .* not finite"),
    ({"weights": np.zeros(FEATURES)}, "the gradient 'weights' .* float64"),
    ({"weights": np.zeros((FEATURES, 1), np.float32)}, f"'weights' .* {FEATURES}x1: expected"),
    ({"weights": np.zeros(2 * FEATURES, np.float32)[::2]}, "'weights' .* not contiguous"),
    ({"loss": float("nan")}, "the loss .* is nan"),
    ({"loss": 1e39}, "the loss .* is inf in float32"),
    ({"metric": float("-inf")}, "the metric 'bias' .* is -inf"),
]


@pytest.mark.parametrize("block", [Block(3, 0), Block(1, 2), Block(0, WRONG)])
@pytest.mark.parametrize(("changes", "problem"), BAD)
def test_error_names_step_shard_and_array(
    block: Block, changes: dict[str, object], problem: str, drawer: RandomAccess
) -> None:
    program = Wrong(**changes)
    computer = computer_of(drawer, program)
    with pytest.raises(InvalidProgram, match=problem) as caught:
        computer.run(
            computer.sum_up(block, program.initial(3), 1, np.empty(computer.elements, np.float32))
        )
    assert f"in step 1, virtual shard {WRONG}" in str(caught.value)


@pytest.mark.parametrize(
    ("step", "made_by"),
    [(0, "training begins with"), (2, r"update\(\) returned for step 1")],
)
def test_a_bad_number_of_the_state_is_not_the_gradients(
    step: int, made_by: str, drawer: RandomAccess
) -> None:
    state = {**Regression().initial(3), "weights": np.full(FEATURES, np.nan, np.float32)}
    computer = computer_of(drawer)
    with pytest.raises(InvalidProgram, match=f"not finite: 'weights' of .* {made_by} holds"):
        computer.run(
            computer.sum_up(Block(3, 0), state, step, np.empty(computer.elements, np.float32))
        )


def test_infinite_sum_of_finite_leaves_is_accepted(drawer: RandomAccess) -> None:
    large = np.full(FEATURES, 3e38, np.float32)

    class Large(Regression):
        def gradient(self, *_: object) -> Contribution:
            return Contribution({"weights": large.copy()}, 0.0)

    computer = computer_of(drawer, Large())
    out = np.empty(computer.elements, np.float32)
    computer.run(computer.sum_up(Block(3, 0), Large().initial(3), 1, out))
    assert np.isinf(out[:FEATURES]).all()
