"""The built-in program of a synchronous job: one model with one hidden layer, on all ranks.

The same model as `muster.classifier` trains independently on each rank, written as a program: what
a batch contributes is a sum over its samples, padding has no weight, and every shape is fixed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.classifier import LEARNING_RATE, MOMENTUM, initial_state
from muster.datasets.listing import find_shards
from muster.datasets.shape import shape_of
from muster.program import Batch, Contribution

Array: TypeAlias = NDArray[np.float32]
Arrays: TypeAlias = Mapping[str, Array]

SHAPE_LINES: Final = 100_000
"""Without facts, so many lines show how many classes there are: every newcomer has to read them."""


class Classifier:
    """Names the class of a sample ``{"x": [features], "y": class}``; a `muster.program.Program`."""

    def __init__(self, dataset_dir: Path) -> None:
        """Look at what the data is like; raises a `DatasetError`."""
        self._shape = shape_of(dataset_dir, find_shards(dataset_dir), lines_limit=SHAPE_LINES)
        self.decode: Final = self._shape.decoder().decode

    def initial(self, seed: int) -> dict[str, Array]:
        return initial_state(*self._shape, seed=seed, rank=0)

    def gradient(self, state: Arrays, batch: Batch, _random: np.random.Generator) -> Contribution:
        inputs = np.array([sample.x for sample in batch.samples], np.float32)
        labels = np.array([sample.y for sample in batch.samples], np.intp)
        rows = np.arange(len(labels))

        hidden = np.tanh(inputs @ state["hidden_weights"] + state["hidden_bias"])
        logits = hidden @ state["output_weights"] + state["output_bias"]
        logits -= logits.max(axis=1, keepdims=True)
        exponentials = np.exp(logits)
        totals = exponentials.sum(axis=1)
        losses = np.log(totals) - logits[rows, labels]
        right = logits.argmax(axis=1) == labels

        slope = exponentials / totals[:, None]
        slope[rows, labels] -= np.float32(1)
        slope *= batch.weights[:, None]
        hidden_slope = (slope @ state["output_weights"].T) * (np.float32(1) - hidden * hidden)
        gradients = {
            "hidden_weights": inputs.T @ hidden_slope,
            "hidden_bias": hidden_slope.sum(axis=0),
            "output_weights": hidden.T @ slope,
            "output_bias": slope.sum(axis=0),
        }
        metrics = {"accuracy": float(batch.weights[right].sum())}
        return Contribution(gradients, float((losses * batch.weights).sum()), metrics)

    def update(self, state: Arrays, gradients: Arrays, _step: int) -> dict[str, Any]:
        momenta = {
            name: MOMENTUM * state[f"{name}.momentum"] - LEARNING_RATE * gradient
            for name, gradient in gradients.items()
        }
        weights = {name: state[name] + momentum for name, momentum in momenta.items()}
        return {**weights, **{f"{name}.momentum": value for name, value in momenta.items()}}
