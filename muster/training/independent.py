"""The built-in program in independent mode: each rank trains its own classifier on its own shards.

Everything is a function of (seed, rank, data): the initial weights are keyed by seed and rank,
samples come in the order of the shards, and all arithmetic is float32 with fixed shapes. A run that
was killed and resumed therefore ends with the same bits as an undisturbed one.
"""

import math
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.checkpoints.errors import CheckpointMismatch
from muster.contracts.environ import RankSettings
from muster.datasets.schema import LabelledSample, SampleSchema, schema_of
from muster.run import Run
from muster.runtime.agent_client import AgentClient
from muster.runtime.stderr_messages import print_stdout

Array: TypeAlias = NDArray[np.float32]
State: TypeAlias = dict[str, Array]

HIDDEN: Final = 64
LEARNING_RATE: Final = np.float32(0.05)
MOMENTUM: Final = np.float32(0.9)
PROGRESS_SECONDS: Final = 1.0
"""At most one progress line per second."""


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
    """Return the share of `samples` that the model classifies correctly."""
    inputs = np.array([sample.x for sample in samples], np.float32)
    hidden = np.tanh(inputs @ state["hidden_weights"] + state["hidden_bias"])
    predicted = (hidden @ state["output_weights"] + state["output_bias"]).argmax(axis=1)
    return float((predicted == np.array([sample.y for sample in samples])).mean())


def main(settings: RankSettings, agent: AgentClient) -> int:
    """Train one rank to the end or until it is asked to stop; return the exit code."""
    run = Run(settings, agent)
    run.start()
    if run.samples_per_epoch == 0:
        _print(run, "has no samples: nothing to do")
        return 0
    _train(run, schema_of(run.settings.dataset_dir, run.shards))
    return 0


def _train(run: Run, shape: SampleSchema) -> None:
    state = _first_state(run, shape)
    next_line_at = 0.0
    saved_at = run.steps_done
    for batch in run.batches(decoder=shape.decoder()):
        inputs = np.array([sample.x for sample in batch], np.float32)
        labels = np.array([sample.y for sample in batch], np.intp)
        loss = train_step(state, inputs, labels)
        run.step(loss=loss)
        if run.should_checkpoint:
            run.checkpoint(state)
            saved_at = run.steps_done
        now = time.monotonic()
        if now >= next_line_at:
            next_line_at = now + PROGRESS_SECONDS
            _print(run, f"epoch {run.epoch + 1}  loss {loss:.4f}")
        run.rest(run.settings.sleep_sec)
        if run.should_stop:
            break
    if saved_at != run.steps_done or run.steps_done == 0:
        run.checkpoint(state)
    _print(run, "is asked to stop; saved" if run.should_stop else "is done")


def _first_state(run: Run, shape: SampleSchema) -> State:
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
    _print(run, f"goes on from its checkpoint of step {run.steps_done}")
    return restored


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(value) for name, value in state.items()}


def _print(run: Run, words: str) -> None:
    total = "" if run.total_steps is None else f"/{run.total_steps}"
    print_stdout(f"rank {run.rank}  step {run.steps_done}{total}  {words}")


def _descend(state: State, name: str, gradient: Array) -> None:
    momentum = state[f"{name}.momentum"]
    momentum *= MOMENTUM
    momentum -= LEARNING_RATE * gradient
    state[name] += momentum
