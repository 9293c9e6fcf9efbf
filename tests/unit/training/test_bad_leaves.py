"""A bad contribution is reported with its leaf, although only sums are checked."""

import numpy as np
import pytest

from muster.collectives.tree import Block
from muster.datasets.random_access import RandomAccess
from muster.program import Batch, Contribution, InvalidProgram, State
from tests.support.small_shares import computer_of
from tests.support.stage import FEATURES, Regression

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


BAD = [
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
        computer.compute(block, program.initial(3), 1, np.empty(computer.elements, np.float32))
    assert f"in step 1, virtual shard {WRONG}" in str(caught.value)


def test_infinite_sum_of_finite_leaves_is_accepted(drawer: RandomAccess) -> None:
    large = np.full(FEATURES, 3e38, np.float32)

    class Large(Regression):
        def gradient(self, *_: object) -> Contribution:
            return Contribution({"weights": large.copy()}, 0.0)

    computer = computer_of(drawer, Large())
    out = np.empty(computer.elements, np.float32)
    computer.compute(Block(3, 0), Large().initial(3), 1, out)
    assert np.isinf(out[:FEATURES]).all()
