"""The built-in program: a numpy classifier with one hidden layer, in independent mode.

Each rank trains a model of its own on its own shards. Everything is a function of (seed, rank,
data): the initial weights are keyed by both, samples come in the order of the shards, and all
arithmetic is in float32 with fixed shapes. So a run that was killed and resumed ends with the same
bits as one that was not.
"""

import math
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.checkpoints.errors import CheckpointMismatch
from muster.contracts.environ import RankSettings
from muster.datasets.samples import LabelledSample
from muster.datasets.shape import SampleShape, shape_of
from muster.remarks import narrate
from muster.run import Run
from muster.voice import Voice

Array: TypeAlias = NDArray[np.float32]
State: TypeAlias = dict[str, Array]

HIDDEN: Final = 64
LEARNING_RATE: Final = np.float32(0.05)
MOMENTUM: Final = np.float32(0.9)
PROGRESS_SECONDS: Final = 1.0
"""At most one progress line a second: a log is read by people."""


def initial_state(features: int, classes: int, *, seed: int, rank: int) -> State:
    """Return weights and zero momenta; uniform in ±1/sqrt(inputs), keyed by (seed, rank)."""
    random = np.random.Generator(np.random.Philox(key=np.array([seed, rank], dtype=np.uint64)))

    def weights(inputs: int, outputs: int) -> Array:
        reach = 1.0 / math.sqrt(inputs)
        return random.uniform(-reach, reach, (inputs, outputs)).astype(np.float32)

    parameters = {
        "hidden_weights": weights(features, HIDDEN),
        "hidden_bias": np.zeros(HIDDEN, np.float32),
        "output_weights": weights(HIDDEN, classes),
        "output_bias": np.zeros(classes, np.float32),
    }
    momenta = {f"{name}.momentum": np.zeros_like(value) for name, value in parameters.items()}
    return {**parameters, **momenta}


def train_step(state: State, inputs: Array, labels: NDArray[np.intp]) -> float:
    """Take one step of gradient descent with momentum, in place; return the mean loss.

    `inputs` is (batch, features) float32, `labels` is (batch,). The loss is softmax
    cross-entropy. Sums run over the batch in numpy's fixed order for that shape.
    """
    hidden = np.tanh(inputs @ state["hidden_weights"] + state["hidden_bias"])
    logits = hidden @ state["output_weights"] + state["output_bias"]
    logits -= logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits)
    totals = exponentials.sum(axis=1)
    rows = np.arange(len(labels))
    loss = float((np.log(totals) - logits[rows, labels]).mean())

    slope = exponentials / totals[:, None]
    slope[rows, labels] -= np.float32(1)
    slope /= np.float32(len(labels))
    hidden_slope = (slope @ state["output_weights"].T) * (np.float32(1) - hidden * hidden)
    _descend(state, "output_weights", hidden.T @ slope)
    _descend(state, "output_bias", slope.sum(axis=0))
    _descend(state, "hidden_weights", inputs.T @ hidden_slope)
    _descend(state, "hidden_bias", hidden_slope.sum(axis=0))
    return loss


def accuracy(state: State, samples: Sequence[LabelledSample]) -> float:
    """Return the share of `samples` whose class the model names."""
    inputs = np.array([sample.x for sample in samples], np.float32)
    hidden = np.tanh(inputs @ state["hidden_weights"] + state["hidden_bias"])
    named = (hidden @ state["output_weights"] + state["output_bias"]).argmax(axis=1)
    return float((named == np.array([sample.y for sample in samples])).mean())


def main(settings: RankSettings, voice: Voice) -> int:
    """Train one rank to the end, or until it is asked to stop; return the exit code."""
    run = Run(settings, voice)
    run.start()
    if run.samples_per_epoch == 0:
        _say(run, "has no samples: nothing to do")
        return 0
    _train(run, shape_of(run.settings.dataset_dir, run.shards))
    return 0


def _train(run: Run, shape: SampleShape) -> None:
    state = _state_to_begin_with(run, shape)
    report = _ProgressReport(run)
    saved_at = run.steps_done
    for batch in run.batches(decoder=shape.decoder()):
        inputs = np.array([sample.x for sample in batch], np.float32)
        labels = np.array([sample.y for sample in batch], np.intp)
        loss = train_step(state, inputs, labels)
        run.step(loss=loss)
        if run.should_checkpoint:
            run.checkpoint(state)
            saved_at = run.steps_done
        report.now_and_then(loss)
        run.rest(run.settings.sleep_sec)
        if run.should_stop:
            break
    if saved_at != run.steps_done or run.steps_done == 0:
        run.checkpoint(state)
    _say(run, "is asked to stop; saved" if run.should_stop else "is done")


def _state_to_begin_with(run: Run, shape: SampleShape) -> State:
    fresh = initial_state(*shape, seed=run.settings.seed, rank=run.rank)
    restored = run.restore()
    if restored is None:
        return fresh
    if _shapes(restored) != _shapes(fresh):
        raise CheckpointMismatch(
            f"the checkpoint of step {run.steps_done} holds a model for other data: rank "
            f"{run.rank} reads {shape.features} features and {shape.classes} classes. Name another "
            "data set, or begin a job that does not resume"
        )
    _say(run, f"goes on from its checkpoint of step {run.steps_done}")
    return restored


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(value) for name, value in state.items()}


class _ProgressReport:
    """One line a second at the most: a log is read by people."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._next = 0.0

    def now_and_then(self, loss: float) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_SECONDS
            _say(self._run, f"epoch {self._run.epoch + 1}  loss {loss:.4f}")


def _say(run: Run, words: str) -> None:
    total = "" if run.total_steps is None else f"/{run.total_steps}"
    narrate(f"rank {run.rank}  step {run.steps_done}{total}  {words}")


def _descend(state: State, name: str, gradient: Array) -> None:
    momentum = state[f"{name}.momentum"]
    momentum *= MOMENTUM
    momentum -= LEARNING_RATE * gradient
    state[name] += momentum
