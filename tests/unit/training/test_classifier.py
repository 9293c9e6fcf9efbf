"""The built-in program, in both modes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muster.checkpoints.errors import CheckpointMismatch
from muster.datasets.errors import DatasetMissing, InvalidSample
from muster.datasets.schema import LabelledSample
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.program import Batch
from muster.run import Run
from muster.runtime.agent_client import AgentClient, AgentSocket
from muster.training import independent
from muster.training.blocks import LeafRng
from muster.training.classifier import Classifier, initial_state
from muster.training.schema import Leaf
from tests.support.plain_training import PlainTraining
from tests.support.ranks import settings_of, write_shards

FEATURES, CLASSES = 5, 3
GOOD = {"x": [0.0] * FEATURES, "y": 1}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write(tmp_path) / "data"


def write(place: Path, *, with_facts: bool = True) -> Path:
    contents = synthetic(samples=90, shards=3, features=FEATURES, classes=CLASSES)
    write_dataset(place / "data", contents)
    if not with_facts:
        (place / "data" / "dataset.json").unlink()
    return place


def samples(count: int) -> list[LabelledSample]:
    draw = np.random.default_rng(0)
    return [
        LabelledSample(x=draw.random(FEATURES).tolist(), y=int(draw.integers(CLASSES)))
        for _ in range(count)
    ]


def contribution(program: Classifier, of: list[LabelledSample], *weights: float) -> dict:
    batch = Batch(of, np.array(weights, np.float32))
    made = program.gradient(program.initial(1), batch, LeafRng(1).at(0, Leaf(0, 0)))
    return {**made.gradients, "loss": made.loss, **made.metrics}


def test_training_twice_gives_the_same_bits(dataset: Path) -> None:
    first, again = (
        PlainTraining(Classifier(dataset), dataset, seed=3, batch_size=32, virtual_shards=8)
        .run(epochs=2)
        .state
        for _ in range(2)
    )
    for name, array in first.items():
        assert array.tobytes() == again[name].tobytes(), name


def test_both_modes_take_the_same_step(dataset: Path) -> None:
    program, batch = Classifier(dataset), samples(8)
    inputs = np.array([sample.x for sample in batch], np.float32)
    state = initial_state(FEATURES, CLASSES, seed=1, rank=0)
    loss = independent.train_step(state, inputs, np.array([sample.y for sample in batch]))
    made = contribution(program, batch, *[1] * 8)
    assert made.pop("loss") / 8 == pytest.approx(loss, rel=1e-6)
    del made["accuracy"]
    means = {name: array / np.float32(8) for name, array in made.items()}
    for name, array in program.update(program.initial(1), means, 0).items():
        np.testing.assert_allclose(array, state[name], rtol=1e-5, atol=1e-7)


def test_padding_adds_nothing(dataset: Path) -> None:
    program = Classifier(dataset)
    first, second, *others = samples(4)
    whole = contribution(program, [first, second, *others], 1, 1, 0, 0)
    other = contribution(program, [first, second, second, second], 1, 1, 0, 0)
    for name, value in whole.items():
        np.testing.assert_array_equal(value, other[name])
    nothing = contribution(program, [first] * 4, 0, 0, 0, 0)
    assert not any(np.any(value) for value in nothing.values())


@pytest.mark.parametrize("with_facts", [True, False])
def test_model_has_the_shape_of_the_data(tmp_path: Path, *, with_facts: bool) -> None:
    state = Classifier(write(tmp_path, with_facts=with_facts) / "data").initial(0)
    assert state["hidden_weights"].shape == (FEATURES, 64)
    assert state["output_weights"].shape == (64, CLASSES)


def test_missing_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing, match="muster dataset"):
        Classifier(tmp_path / "nothing")


def test_ranks_start_with_different_weights() -> None:
    first, second, again = (
        initial_state(4, 3, seed=0, rank=rank)["hidden_weights"].tobytes() for rank in (0, 1, 0)
    )
    assert first == again != second


class Killed(Exception):
    """The process ends here."""


class MortalRun(Run):
    """A run that is killed after so many of its steps; None: never."""

    steps_to_live: int | None = None

    def start(self) -> None:
        """Install no signal handler and no hook: this is a test's process."""

    def step(self, *, loss: float | None = None, **metrics: float) -> None:
        super().step(loss=loss, **metrics)
        if self.steps_to_live is not None:
            self.steps_to_live -= 1
            if self.steps_to_live == 0:
                raise Killed


Train = Callable[..., int]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train one rank in this process, killed after `steps` steps."""
    monkeypatch.setattr(independent, "Run", MortalRun)

    def train(place: Path, steps: int | None = None, **names: object) -> int:
        monkeypatch.setattr(MortalRun, "steps_to_live", steps)
        return independent.main(settings_of(place, **names), AgentClient(AgentSocket(None)))

    return train


def final_state(place: Path) -> tuple[int, dict[str, np.ndarray]]:
    run = Run(settings_of(place), AgentClient(AgentSocket(None)))
    state = run.restore()
    assert state is not None
    return run.steps_done, state


@pytest.mark.slow
@pytest.mark.parametrize("with_facts", [True, False])
@pytest.mark.parametrize("killed_after", [1, 4, 5, 6, 11])
def test_killed_and_resumed_run_has_the_same_bits(
    tmp_path: Path, train: Train, killed_after: int, *, with_facts: bool
) -> None:
    names = {"MUSTER_EPOCHS": 2, "CHECKPOINT_EVERY": 3}
    undisturbed = write(tmp_path / "undisturbed", with_facts=with_facts)
    assert train(undisturbed, **names) == 0
    killed = write(tmp_path / "killed", with_facts=with_facts)
    with pytest.raises(Killed):
        train(killed, killed_after, **names)
    assert train(killed, **names) == 0
    steps, state = final_state(undisturbed)
    steps_again, state_again = final_state(killed)
    assert steps == steps_again == 12, "90 samples twice, 16 a step, the last of an epoch shorter"
    assert {name: array.tobytes() for name, array in state.items()} == {
        name: array.tobytes() for name, array in state_again.items()
    }


def test_rank_without_shards_is_done_at_once(
    tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(write(tmp_path), RANK=3, WORLD_SIZE=4) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({"x": [0.0] * 4, "y": 0}, "length >= 5"),
        ({"x": [0.0] * 6, "y": 0}, "length <= 5"),
        ({"x": [0.0] * 5, "y": 3}, "<= 2"),
        ({"x": [0.0] * 5, "y": -1}, ">= 0"),
        ({"x": [0.0] * 5}, "missing required field `y`"),
    ],
)
def test_sample_of_another_shape_is_named(
    tmp_path: Path, train: Train, sample: object, problem: str
) -> None:
    data = write(tmp_path) / "data"
    (data / "shard_00000.idx").unlink()
    write_shards(data, [GOOD, GOOD, sample, GOOD])
    with pytest.raises(InvalidSample, match=rf"shard_00000.txt:3: .*{problem}"):
        train(tmp_path)


def test_without_facts_the_first_sample_sets_the_shape(tmp_path: Path, train: Train) -> None:
    write_shards(tmp_path / "data", [GOOD, {"x": [0.0], "y": 0}])
    with pytest.raises(InvalidSample, match=r"shard_00000.txt:2: .*length >= 5"):
        train(tmp_path)


def test_model_of_another_shape_is_refused(tmp_path: Path, train: Train) -> None:
    write_shards(tmp_path / "data", [GOOD] * 20)
    train(tmp_path)
    for file in (tmp_path / "data").iterdir():
        file.unlink()
    write_shards(tmp_path / "data", [{"x": [0.0] * 6, "y": 1}] * 40)
    with pytest.raises(CheckpointMismatch, match="reads 6 features and 2 classes"):
        train(tmp_path)
