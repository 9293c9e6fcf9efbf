"""The built-in program in independent mode: each rank trains its own classifier on its own shards.

Everything is a function of (seed, rank, data), and samples come in the order of the shards. A run
that was killed and resumed therefore ends with the same bits as an undisturbed one.
"""

import time
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.checkpoints.errors import CheckpointMismatch
from muster.contracts.settings.environ import RankSettings
from muster.datasets.schema import SampleSchema, schema_of
from muster.run import Run
from muster.runtime.agent_client import AgentClient
from muster.runtime.stderr_messages import print_stdout
from muster.training.classifier import (
    LEARNING_RATE,
    MOMENTUM,
    backward,
    forward,
    initial_state,
)

Array: TypeAlias = NDArray[np.float32]
State: TypeAlias = dict[str, Array]

PROGRESS_SECONDS: Final = 1.0
"""At most one progress line per second."""


def train_step(state: State, inputs: Array, labels: NDArray[np.intp]) -> float:
    """Take one step of gradient descent with momentum, in place; return the mean loss.

    `inputs` is (batch, features) float32, `labels` is (batch,).
    """
    hidden, _, losses, slope = forward(state, inputs, labels)
    slope /= np.float32(len(labels))
    for name, gradient in backward(state, inputs, hidden, slope).items():
        momentum = state[f"{name}.momentum"]
        momentum *= MOMENTUM
        momentum -= LEARNING_RATE * gradient
        state[name] += momentum
    return float(losses.mean())


def main(settings: RankSettings, agent: AgentClient) -> int:
    """Train one rank to the end or until it is asked to stop; return the exit code."""
    run = Run(settings, agent)
    run.start()
    if run.count_samples() == 0:
        run.is_complete = True
        _print(run, "has no samples: nothing to do")
        return 0
    _train(run, schema_of(run.source, run.reading))
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
    run.flush()
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
    print_stdout(f"step {run.steps_done}{total}  {words}")
