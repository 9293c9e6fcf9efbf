from collections.abc import Mapping

import numpy as np
import pytest

from muster.contracts.messages.rank import METRIC_NAME_LIMIT, METRICS_LIMIT
from muster.program import Contribution, InvalidProgram
from muster.training.schema import GradientSchema, Leaf, StateSchema, read_only

LEAF = Leaf(step=12, shard=5)
STATE = {
    "weights": np.zeros((2, 3), np.float32),
    "bias": np.zeros((), np.float32),
    "steps": np.zeros(1, np.int64),
}


def contribution(
    loss: float = 6.0, metrics: Mapping[str, float] | None = None, **gradients: object
) -> Contribution:
    made = {
        "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bias": np.array(9, np.float32),
        **gradients,
    }
    kept = {name: array for name, array in made.items() if array is not None}
    return Contribution(kept, loss, {"right": 3.0, "hits": 2.0} if metrics is None else metrics)


@pytest.fixture
def shape() -> GradientSchema:
    return GradientSchema.of(STATE, contribution(), LEAF)


def test_summed_numbers_lie_in_one_vector_by_name(
    shape: GradientSchema,
) -> None:
    vector = np.empty(shape.elements, np.float32)
    shape.write(contribution(), 2.0, LEAF, vector, STATE)
    assert vector.tolist() == [9, 0, 1, 2, 3, 4, 5, 6.0, 2.0, 2.0, 3.0]
    assert [(part.name, part.start, part.stop) for part in shape.parts] == [
        ("bias", 0, 1),
        ("weights", 1, 7),
    ]
    assert (shape.gradient_elements, shape.metrics) == (7, ("hits", "right"))


def test_total_is_divided_by_its_weight(shape: GradientSchema) -> None:
    total = np.array([9, 0, 1, 2, 3, 4, 5, 6.0, 2.0, 2.0, 3.0], np.float32)
    means = shape.means(total, np.empty_like(total))
    assert means.gradients["bias"] == 4.5
    assert means.gradients["bias"].shape == ()
    assert means.gradients["weights"].tolist() == [[0, 0.5, 1], [1.5, 2, 2.5]]
    assert (means.loss, means.metrics) == (3.0, {"hits": 1.0, "right": 1.5})
    assert total[8] == 2.0, "the total is not ours to change"
    with pytest.raises(ValueError, match="read-only"):
        means.gradients["weights"][0, 0] = 1


def test_layout_does_not_depend_on_the_order_of_names() -> None:
    first = contribution()
    backwards = Contribution(
        dict(reversed(first.gradients.items())), first.loss, dict(reversed(first.metrics.items()))
    )
    assert GradientSchema.of(STATE, first, LEAF) == GradientSchema.of(STATE, backwards, LEAF)


def test_program_without_metrics_sums_loss_and_weight() -> None:
    bare = contribution(metrics={})
    shape = GradientSchema.of(STATE, bare, LEAF)
    vector = np.empty(shape.elements, np.float32)
    shape.write(bare, 2.0, LEAF, vector, STATE)
    assert vector[-2:].tolist() == [6.0, 2.0]
    assert shape.means(vector, vector.copy()).metrics == {}


@pytest.mark.parametrize(
    "metrics",
    [
        {f"m{number}": 1.0 for number in range(METRICS_LIMIT + 1)},
        {"m" * (METRIC_NAME_LIMIT + 1): 1.0},
    ],
)
def test_too_many_metrics_are_refused(metrics: dict[str, float]) -> None:
    with pytest.raises(InvalidProgram, match="at most 64 of up to 128 characters"):
        GradientSchema.of(STATE, contribution(metrics=metrics), LEAF)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (contribution(bias=None), r"expected 'bias', 'weights', .* got 'weights'"),
        (contribution(more=np.zeros(1, np.float32)), r"got 'bias', 'more', 'weights'"),
        (contribution(weights=np.zeros((3, 2), np.float32)), r"float32 3x2: expected .* 2x3"),
        (contribution(bias=9.0), r"'bias' in .* is a float: .* float32 without dimensions"),
        (contribution(bias=np.array(-np.inf, np.float32)), r"gradient 'bias' in .* not finite"),
        (contribution(loss=None), "the loss in .* is nan"),  # type: ignore[arg-type]
        (contribution(loss=[1.0, 2.0]), "the loss or a metric in .* is not a number: setting"),  # type: ignore[arg-type]
        (({}, 1.0), "what gradient.. returned in .* is a tuple: expected a Contribution"),
        (Contribution(None, 1.0), "expected a mapping with names, got a NoneType"),  # type: ignore[arg-type]
        (contribution(metrics={"right": 1.0, "hits": float("inf")}), "the metric 'hits' in .* inf"),
        (contribution(metrics={"right": 1.0}), "expected 'hits', 'right', .* got 'right'"),
    ],
)
def test_later_contribution_must_match_the_first(
    shape: GradientSchema, bad: Contribution, problem: str
) -> None:
    with pytest.raises(InvalidProgram, match=problem) as caught:
        shape.write(bad, 2.0, LEAF, np.empty(shape.elements, np.float32), STATE)
    assert "in step 12, virtual shard 5" in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (contribution(weights=np.zeros((3, 2), np.float32)), "expected an array of float32 2x3"),
        (contribution(other=np.zeros(3)), "'other' in .* is an array of float64 3"),
        (Contribution([1, 2], 0.0), "the gradients .*: expected a mapping with names, got a list"),  # type: ignore[arg-type]
        (
            Contribution({}, 0.0, {3: 1.0}),
            "the metrics .*: expected a mapping with names, got a dict",
        ),  # type: ignore[dict-item]
    ],
)
def test_first_contribution_must_fit_the_state(bad: Contribution, problem: str) -> None:
    with pytest.raises(InvalidProgram, match=problem):
        GradientSchema.of(STATE, bad, LEAF)


def test_new_state_is_copied_into_the_target() -> None:
    target = {name: array.copy() for name, array in STATE.items()}
    new = {name: array + np.ones_like(array) for name, array in STATE.items()}
    new["bias"] = np.float32(1)  # as numpy computes it from an array without dimensions
    StateSchema.of(STATE).write(new, 3, target)
    assert {name: array.tolist() for name, array in target.items()} == {
        "weights": [[1, 1, 1], [1, 1, 1]],
        "bias": 1.0,
        "steps": [1],
    }
    assert not any(np.shares_memory(target[name], new[name]) for name in new)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"weights": np.ones((3, 2), np.float32)}, "'weights' of .* float32 3x2: expected .* 2x3"),
        ({"steps": np.ones(1, np.int32)}, "an array of int32 1: expected an array of int64 1"),
        ({"bias": 1.0}, "'bias' of .* for step 3 is a float: expected an array"),
        ({"bias": np.float64(1)}, "'bias' of .* for step 3 is a float64: expected an array"),
        ({"more": np.ones(1)}, "for step 3: expected .*, got 'bias', 'more', 'steps', 'weights'"),
    ],
)
def test_new_state_of_another_shape_writes_nothing(change: dict[str, object], problem: str) -> None:
    target = {name: array.copy() for name, array in STATE.items()}
    new = {**{name: np.ones_like(array) for name, array in STATE.items()}, **change}
    with pytest.raises(InvalidProgram, match=problem):
        StateSchema.of(STATE).write(new, 3, target)  # type: ignore[arg-type]
    assert not any(array.any() for array in target.values())


@pytest.mark.parametrize(
    "value",
    [
        3,
        [1.0],
        np.float32(1),
        np.array(["a"]),
        np.zeros(1, ">f4"),
        np.ma.zeros(1),
        np.zeros(1, "c8"),
    ],
)
def test_first_state_must_fit_into_a_checkpoint(value: object) -> None:
    with pytest.raises(InvalidProgram, match=r"'w' of the state that initial\(\) returned is a"):
        StateSchema.of({"w": value})  # type: ignore[dict-item]


def test_states_must_be_mappings() -> None:
    with pytest.raises(InvalidProgram, match="for step 3: expected a mapping with names"):
        StateSchema.of(STATE).write(None, 3, {})  # type: ignore[arg-type]
    with pytest.raises(InvalidProgram, match="expected a mapping with names, got a list"):
        StateSchema.of([np.zeros(1)])  # type: ignore[arg-type]


def test_read_only_views_leave_the_arrays_writable() -> None:
    state = {"weights": np.zeros(2, np.float32)}
    with pytest.raises(ValueError, match="read-only"):
        read_only(state)["weights"] += 1
    state["weights"] += 1
    assert state["weights"].tolist() == [1, 1]
