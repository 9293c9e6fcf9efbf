"""The built-in program of a synchronous job: a classifier with one hidden layer.

The model of `muster.training.independent`, written as a program: a contribution is a sum over the
samples of a batch, padding has no weight, and every shape is fixed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.datasets.reader import find_shards
from muster.datasets.schema import schema_of
from muster.program import Batch, Contribution
from muster.training.independent import LEARNING_RATE, MOMENTUM, initial_state

Array: TypeAlias = NDArray[np.float32]
Arrays: TypeAlias = Mapping[str, Array]

SHAPE_LINES: Final = 100_000
"""Lines that are read to count features and classes where the data set does not state them. Every
new rank reads them."""


class Classifier:
    """A `muster.program.Program` that classifies samples ``{"x": [features], "y": class}``."""

    def __init__(self, dataset_dir: Path) -> None:
        """Read the number of features and classes from the data; raises `DatasetError`."""
        self._shape = schema_of(dataset_dir, find_shards(dataset_dir), lines_limit=SHAPE_LINES)
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
