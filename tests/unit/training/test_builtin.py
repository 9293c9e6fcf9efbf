from pathlib import Path

import numpy as np
import pytest

from muster.datasets.errors import DatasetMissing, InvalidSample
from muster.datasets.reader import find_shards
from muster.datasets.schema import LabelledSample
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.program import Batch
from muster.training.blocks import LeafRng
from muster.training.classifier import Classifier, initial_state
from muster.training.independent import train_step
from muster.training.loader import load_program
from muster.training.schema import Leaf
from tests.support.plain_training import PlainTraining

FEATURES, CLASSES = 5, 3


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    contents = synthetic(samples=90, shards=3, features=FEATURES, classes=CLASSES)
    write_dataset(directory, contents)
    return directory


def training(dataset: Path, batch_size: int = 32, virtual_shards: int = 8) -> PlainTraining:
    program = load_program("muster.training.classifier:Classifier", dataset, dataset_dir=dataset)
    return PlainTraining(
        program, dataset, seed=3, batch_size=batch_size, virtual_shards=virtual_shards
    )


def samples(count: int, seed: int = 0) -> list[LabelledSample]:
    chance = np.random.default_rng(seed)
    return [
        LabelledSample(x=chance.random(FEATURES).tolist(), y=int(chance.integers(CLASSES)))
        for _ in range(count)
    ]


def weights(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def contribution(program: Classifier, of: list[LabelledSample], by: np.ndarray) -> dict:
    state = program.initial(1)
    made = program.gradient(state, Batch(of, by), LeafRng(1).at(0, Leaf(0, 0)))
    return {**made.gradients, "loss": made.loss, **made.metrics}


def test_it_ends_with_the_same_bits_every_time(dataset: Path) -> None:
    states = [training(dataset).run(epochs=2).state for _ in range(2)]
    for name, array in states[0].items():
        assert array.tobytes() == states[1][name].tobytes(), name


def test_its_sum_over_a_batch_is_what_the_independent_one_means(dataset: Path) -> None:
    program = Classifier(dataset)
    batch = samples(8)
    inputs = np.array([sample.x for sample in batch], np.float32)
    state = initial_state(FEATURES, CLASSES, seed=1, rank=0)
    loss = train_step(state, inputs, np.array([sample.y for sample in batch]))
    first = program.initial(1)
    made = program.gradient(first, Batch(batch, weights(*[1] * 8)), LeafRng(1).at(0, Leaf(0, 0)))
    means = {name: array / np.float32(8) for name, array in made.gradients.items()}
    assert made.loss / 8 == pytest.approx(loss, rel=1e-6)
    for name, array in program.update(first, means, 0).items():
        np.testing.assert_allclose(array, state[name], rtol=1e-5, atol=1e-7)


def test_padding_adds_nothing(dataset: Path) -> None:
    program = Classifier(dataset)
    first, second, *others = samples(4)
    whole = contribution(program, [first, second, *others], weights(1, 1, 0, 0))
    other = contribution(program, [first, second, second, second], weights(1, 1, 0, 0))
    for name, value in whole.items():
        np.testing.assert_array_equal(value, other[name])
    nothing = contribution(program, [first] * 4, weights(0, 0, 0, 0))
    assert not any(np.any(value) for value in nothing.values())


def test_a_program_changes_nothing_it_is_given(dataset: Path) -> None:
    training(dataset).run(epochs=1)  # with views that cannot be written to
    program = Classifier(dataset)
    state = program.initial(0)
    assert {name: array.tobytes() for name, array in state.items()} == {
        name: array.tobytes() for name, array in program.initial(0).items()
    }


@pytest.mark.parametrize("with_facts", [True, False])
def test_its_shape_is_that_of_the_data(dataset: Path, *, with_facts: bool) -> None:
    if not with_facts:
        (dataset / "dataset.json").unlink()
    state = Classifier(dataset).initial(0)
    assert state["hidden_weights"].shape == (FEATURES, 64)
    assert state["output_weights"].shape == (64, CLASSES)


def test_a_sample_of_another_shape_is_named_by_file_and_line(dataset: Path) -> None:
    shard = find_shards(dataset)[1]
    shard.write_bytes(shard.read_bytes() + b'{"x":[1,2,3,4],"y":0}\n')
    with pytest.raises(InvalidSample, match=r"shard_00001.txt:31: no sample, .* length >= 5"):
        training(dataset).run(epochs=1)


def test_without_data_it_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing, match="muster dataset"):
        Classifier(tmp_path / "nothing")
