from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from muster.checkpoints.errors import CheckpointMismatch
from muster.datasets.errors import InvalidSample
from muster.datasets.schema import LabelledSample
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.run import Run
from muster.runtime.agent_client import AgentClient, AgentSocket
from muster.training import independent
from muster.training.classifier import accuracy, initial_state
from tests.support.ranks import settings_of, write_shards


class Killed(Exception):
    """The process ends here, whatever it was doing."""


class MortalRun(Run):
    """A run that is killed after so many steps of its own; None: never."""

    steps_to_live: int | None = None

    def start(self) -> None:
        """Take over no signal and no hook: this is a test's process."""

    def step(self, *, loss: float | None = None, **metrics: float) -> None:
        super().step(loss=loss, **metrics)
        if self.steps_to_live is not None:
            self.steps_to_live -= 1
            if self.steps_to_live == 0:
                raise Killed


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the classifier in this process, killed after `steps` steps."""
    monkeypatch.setattr(independent, "Run", MortalRun)

    def train(place: Path, steps: int | None = None, **names: object) -> int:
        monkeypatch.setattr(MortalRun, "steps_to_live", steps)
        return independent.main(settings_of(place, **names), AgentClient(AgentSocket(None)))

    return train


def final_state(place: Path, **names: object) -> tuple[int, dict[str, np.ndarray]]:
    run = Run(settings_of(place, **names), AgentClient(AgentSocket(None)))
    state = run.restore()
    assert state is not None
    return run.steps_done, state


def dataset(place: Path, *, with_facts: bool = True) -> Path:
    write_dataset(place / "data", synthetic(samples=90, shards=3, features=5, classes=3))
    if not with_facts:
        (place / "data" / "dataset.json").unlink()
    return place


@pytest.mark.parametrize("with_facts", [True, False])
@pytest.mark.parametrize("killed_after", [1, 4, 5, 6, 11])
def test_killed_and_resumed_it_ends_with_the_same_bits(
    tmp_path: Path, train: Callable[..., int], killed_after: int, *, with_facts: bool
) -> None:
    names = {"MUSTER_EPOCHS": 2, "CHECKPOINT_EVERY": 3}
    undisturbed = dataset(tmp_path / "undisturbed", with_facts=with_facts)
    assert train(undisturbed, **names) == 0
    killed = dataset(tmp_path / "killed", with_facts=with_facts)
    with pytest.raises(Killed):
        train(killed, killed_after, **names)
    assert train(killed, **names) == 0
    steps, state = final_state(undisturbed)
    steps_again, state_again = final_state(killed)
    assert steps == steps_again == 12, "90 samples twice, 16 at a time, the last of a pass shorter"
    assert state.keys() == state_again.keys()
    for name, array in state.items():
        assert array.tobytes() == state_again[name].tobytes(), name


def test_it_learns(tmp_path: Path, train: Callable[..., int]) -> None:
    write_dataset(tmp_path / "data", synthetic(samples=512, shards=1))
    train(tmp_path, MUSTER_EPOCHS=8, CHECKPOINT_EVERY=1000)
    _, state = final_state(tmp_path)
    (shard,) = (tmp_path / "data").glob("*.txt")
    decoder = msgspec.json.Decoder(LabelledSample)
    samples = decoder.decode_lines(shard.read_bytes())
    assert accuracy(state, samples) > 0.9


def test_a_rank_without_shards_is_through_at_once(
    tmp_path: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    place = dataset(tmp_path)
    assert train(place, RANK=3, WORLD_SIZE=4) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (place / "checkpoints").exists()


def test_ranks_begin_with_weights_of_their_own() -> None:
    first, second, again = (
        initial_state(4, 3, seed=0, rank=rank)["hidden_weights"] for rank in (0, 1, 0)
    )
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != second.tobytes()


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({"x": [0.0] * 4, "y": 0}, "length >= 5"),
        ({"x": [0.0] * 6, "y": 0}, "length <= 5"),
        ({"x": [0.0] * 5, "y": 3}, "<= 2"),
        ({"x": [0.0] * 5, "y": -1}, ">= 0"),
        ({"x": [0.0] * 5}, "missing required field `y`"),
        ({"x": ["a"] * 5, "y": 0}, "Expected `float`"),
        ([], "Expected `object`"),
    ],
)
def test_a_sample_of_another_shape_is_named_by_file_and_line(
    tmp_path: Path, train: Callable[..., int], sample: object, problem: str
) -> None:
    place = dataset(tmp_path)
    good = {"x": [0.0] * 5, "y": 0}
    write_shards(place / "data", [good, good, sample, good])
    for index in (place / "data").glob("*shard_00000*"):
        if index.suffix != ".txt":
            index.unlink()
    with pytest.raises(InvalidSample) as caught:
        train(place)
    assert "shard_00000.txt:3" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("sample", "problem"),
    [({"x": [0.0], "y": 0}, "length >= 5"), ({"x": [0.0] * 5, "y": -1}, ">= 0")],
)
def test_without_facts_the_first_sample_says_the_shape(
    tmp_path: Path, train: Callable[..., int], sample: object, problem: str
) -> None:
    good = {"x": [0.0] * 5, "y": 1}
    write_shards(tmp_path / "data", [good, sample])
    with pytest.raises(InvalidSample, match=r"shard_00000.txt:2") as caught:
        train(tmp_path)
    assert problem in str(caught.value)


def test_a_model_of_another_shape_is_a_sentence(tmp_path: Path, train: Callable[..., int]) -> None:
    write_shards(tmp_path / "data", [{"x": [0.0] * 5, "y": 1}] * 20)
    train(tmp_path)
    for index in (tmp_path / "data").iterdir():
        index.unlink()
    write_shards(tmp_path / "data", [{"x": [0.0] * 6, "y": 1}] * 40)
    with pytest.raises(CheckpointMismatch, match="reads 6 features and 2 classes"):
        train(tmp_path)
