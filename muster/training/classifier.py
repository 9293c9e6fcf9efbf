"""The built-in program: a classifier with one hidden layer, for both modes of a job.

Everything is a function of (seed, rank, data): the initial weights are keyed by seed and rank, and
all arithmetic is float32 with fixed shapes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.contracts.location import Location, S3Location
from muster.datasets.schema import LabelledSample, schema_of
from muster.datasets.source import DataSource
from muster.datasets.sources import open_source
from muster.program import Batch, Contribution

Array: TypeAlias = NDArray[np.float32]
Arrays: TypeAlias = Mapping[str, Array]

HIDDEN: Final = 64
LEARNING_RATE: Final = np.float32(0.05)
MOMENTUM: Final = np.float32(0.9)

SHAPE_LINES: Final = 100_000
"""Lines that are read to count features and classes where the data set does not state them. Every
new rank reads them."""


def initial_state(features: int, classes: int, *, seed: int, rank: int) -> dict[str, Array]:
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


class Forward(NamedTuple):
    """The results of the forward pass of a batch."""

    hidden: Array  # (batch, HIDDEN)
    logits: Array  # (batch, classes), up to a constant for each sample
    losses: Array  # (batch,), softmax cross-entropy
    slope: Array  # (batch, classes), of the losses over the logits; belongs to the caller


def forward(state: Arrays, inputs: Array, labels: NDArray[np.intp]) -> Forward:
    """Compute a batch: `inputs` is (batch, features), `labels` is (batch,)."""
    rows = np.arange(len(labels))
    hidden = np.tanh(inputs @ state["hidden_weights"] + state["hidden_bias"])
    logits = hidden @ state["output_weights"] + state["output_bias"]
    # A constant changes no softmax, and `exp` of at most 0 cannot overflow.
    logits -= logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits)
    totals = exponentials.sum(axis=1)
    losses = np.log(totals) - logits[rows, labels]
    slope = exponentials / totals[:, None]
    # The slope of softmax cross-entropy: the probabilities, minus one at the label.
    slope[rows, labels] -= np.float32(1)
    return Forward(hidden, logits, losses, slope)


def backward(state: Arrays, inputs: Array, hidden: Array, slope: Array) -> dict[str, Array]:
    """Return the gradients, summed over the batch in numpy's fixed order for that shape."""
    hidden_slope = (slope @ state["output_weights"].T) * (np.float32(1) - hidden * hidden)
    return {
        "hidden_weights": inputs.T @ hidden_slope,
        "hidden_bias": hidden_slope.sum(axis=0),
        "output_weights": hidden.T @ slope,
        "output_bias": slope.sum(axis=0),
    }


def accuracy(state: Arrays, samples: Sequence[LabelledSample]) -> float:
    """Return the share of `samples` that the model classifies correctly."""
    inputs = np.array([sample.x for sample in samples], np.float32)
    labels = np.array([sample.y for sample in samples], np.intp)
    return float((forward(state, inputs, labels).logits.argmax(axis=1) == labels).mean())


class Classifier:
    """A `muster.program.Program` that classifies samples ``{"x": [features], "y": class}``."""

    def __init__(self, dataset: Location | DataSource) -> None:
        """Read the number of features and classes from the data; raises `DatasetError`."""
        source = open_source(dataset) if isinstance(dataset, Path | S3Location) else dataset
        self._shape = schema_of(source, lines_limit=SHAPE_LINES)
        self.decode: Final = self._shape.decoder().decode

    def initial(self, seed: int) -> dict[str, Array]:
        return initial_state(*self._shape, seed=seed, rank=0)

    def gradient(self, state: Arrays, batch: Batch, _random: np.random.Generator) -> Contribution:
        """Return sums over the batch; padding has no weight."""
        inputs = np.array([sample.x for sample in batch.samples], np.float32)
        labels = np.array([sample.y for sample in batch.samples], np.intp)
        hidden, logits, losses, slope = forward(state, inputs, labels)
        slope *= batch.weights[:, None]
        gradients = backward(state, inputs, hidden, slope)
        right = logits.argmax(axis=1) == labels
        metrics = {"accuracy": float(batch.weights[right].sum())}
        return Contribution(gradients, float((losses * batch.weights).sum()), metrics)

    def update(self, state: Arrays, gradients: Arrays, _step: int) -> dict[str, Array]:
        momenta = {
            name: MOMENTUM * state[f"{name}.momentum"] - LEARNING_RATE * gradient
            for name, gradient in gradients.items()
        }
        weights = {name: state[name] + momentum for name, momentum in momenta.items()}
        return {**weights, **{f"{name}.momentum": value for name, value in momenta.items()}}
