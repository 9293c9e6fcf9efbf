"""What the benchmarks of synchronous training train: a million parameters, dear or cheap."""

import os
import platform
import struct
import time
from pathlib import Path

import numpy as np

from muster.program import Batch, Contribution

FEATURES = 64
WIDTH = 960
CLASSES = 10

TIME = struct.Struct("<qd")
"""A step that is taken, and when, in seconds of the monotonic clock."""


class Perceptron:
    """Two hidden layers, by numpy alone; 993 000 parameters."""

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(seed)
        sizes = {"first": (FEATURES, WIDTH), "second": (WIDTH, WIDTH), "third": (WIDTH, CLASSES)}
        return {
            name: (draw.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
            for name, shape in sizes.items()
        }

    def gradient(self, state: dict, batch: Batch, _random: np.random.Generator) -> Contribution:
        inputs = np.array([sample["x"] for sample in batch.samples], np.float32)
        labels = np.array([sample["y"] for sample in batch.samples], np.intp)
        first = np.tanh(inputs @ state["first"])
        second = np.tanh(first @ state["second"])
        errors = second @ state["third"]
        errors[np.arange(len(labels)), labels] -= np.float32(1)
        slope = errors * batch.weights[:, None]
        second_slope = (slope @ state["third"].T) * (np.float32(1) - second * second)
        first_slope = (second_slope @ state["second"].T) * (np.float32(1) - first * first)
        gradients = {
            "first": inputs.T @ first_slope,
            "second": first.T @ second_slope,
            "third": second.T @ slope,
        }
        return Contribution(gradients, float((errors * errors).sum()))

    def update(self, state: dict, gradients: dict, _step: int) -> dict[str, np.ndarray]:
        return {name: state[name] - np.float32(0.01) * gradients[name] for name in state}


class Wide:
    """As many parameters, and next to nothing to compute; writes down when it takes each step."""

    WEIGHTS = 1_000_000

    def __init__(self) -> None:
        self._times = (Path(__file__).parent / f"{os.getpid()}.steps").open("ab", buffering=0)

    def initial(self, _seed: int) -> dict[str, np.ndarray]:
        return {"weights": np.zeros(self.WEIGHTS, np.float32)}

    def gradient(self, state: dict, batch: Batch, _random: np.random.Generator) -> Contribution:
        wanted = np.float32(sum(sample["y"] for sample in batch.samples))
        return Contribution({"weights": state["weights"] - wanted}, 0.0)

    def update(self, state: dict, gradients: dict, step: int) -> dict[str, np.ndarray]:
        if "MUSTER_SPARE" not in os.environ:  # not the trial of a process that waits
            self._times.write(TIME.pack(step, time.monotonic()))
        return {"weights": state["weights"] - np.float32(0.01) * gradients["weights"]}


class Huge(Wide):
    """The same with 100 MB of weights."""

    WEIGHTS = 25_000_000


class Small(Wide):
    """The same with few weights, on hosts that share its directory and number processes alike."""

    WEIGHTS = 1000

    def __init__(self) -> None:
        name = f"{platform.node()}-{os.getpid()}.steps"
        self._times = (Path(__file__).parent / name).open("ab", buffering=0)


class Busy:
    """As many parameters, and 10 ms of processor time for each virtual shard."""

    SHARD_SECONDS = 0.01

    def initial(self, _seed: int) -> dict[str, np.ndarray]:
        return {"weights": np.zeros(1_000_000, np.float32)}

    def gradient(self, state: dict, batch: Batch, _random: np.random.Generator) -> Contribution:
        until = time.thread_time() + self.SHARD_SECONDS
        wanted = np.float32(sum(sample["y"] for sample in batch.samples))
        gradient = {"weights": state["weights"] - wanted}
        while time.thread_time() < until:
            pass
        return Contribution(gradient, 0.0)

    def update(self, state: dict, gradients: dict, _step: int) -> dict[str, np.ndarray]:
        return {"weights": state["weights"] - np.float32(0.01) * gradients["weights"]}


class HalfBusy(Busy):
    """The same with half as much to compute, for jobs that sleep between two steps."""

    SHARD_SECONDS = 0.005
