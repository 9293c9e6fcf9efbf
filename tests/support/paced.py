"""A program that trains as slowly as a test needs, without a bit of difference.

While the file that `PACE_FILE` names exists, every virtual shard takes as many seconds as it says.
So what is to happen to a job happens in its middle, however slow the machine is.
"""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from muster.program import Batch, Contribution

PACE_FILE = "PACE_FILE"
WIDTH = 20_000

Arrays = Mapping[str, np.ndarray]


class Paced:
    """A regression with everything that could break identity: noise, momentum, a metric."""

    def __init__(self) -> None:
        self._pace = Path(os.environ[PACE_FILE])

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        weights = np.random.default_rng(seed).standard_normal(8).astype(np.float32)
        return {"weights": weights, "momentum": np.zeros(8, np.float32)}

    def gradient(self, state: Arrays, batch: Batch, random: np.random.Generator) -> Contribution:
        self._take_time()
        inputs = np.array([sample["x"] for sample in batch.samples], np.float32)
        inputs += random.normal(0, 0.01, inputs.shape).astype(np.float32)
        wanted = np.array([sample["y"] for sample in batch.samples], np.float32)
        errors = (inputs @ state["weights"] - wanted) * batch.weights
        bias = {"bias": float(errors.sum())}
        return Contribution({"weights": inputs.T @ errors}, float(errors @ errors), bias)

    def update(self, state: Arrays, gradients: Arrays, _step: int) -> dict[str, np.ndarray]:
        momentum = np.float32(0.9) * state["momentum"] + gradients["weights"]
        return {"weights": state["weights"] - np.float32(0.05) * momentum, "momentum": momentum}

    def _take_time(self) -> None:
        try:
            time.sleep(float(self._pace.read_text()))
        except FileNotFoundError:
            return


class Wide(Paced):
    """The same pace with enough elements for several chunks of a compressed sum."""

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        weights = np.random.default_rng(seed).standard_normal(WIDTH, np.float32)
        return {"weights": weights, "momentum": np.zeros(WIDTH, np.float32)}

    def gradient(self, state: Arrays, batch: Batch, random: np.random.Generator) -> Contribution:
        self._take_time()
        weight = batch.weights.sum(dtype=np.float32)
        away = state["weights"] - random.standard_normal(WIDTH, np.float32)
        return Contribution({"weights": weight * away}, float(weight * (away @ away)), {})


class Hanging(Paced):
    """Hangs for ever in whichever rank is the first to find the file that asks one to."""

    def _take_time(self) -> None:
        super()._take_time()
        try:
            request_to_hang(self._pace).unlink()
        except FileNotFoundError:
            return
        threading.Event().wait()


class HangingAtFirst(Paced):
    """Its first process of each rank hangs before it has anything to train."""

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        if os.environ["MUSTER_GENERATION"] == "0":
            threading.Event().wait()
        return super().initial(seed)


def request_to_hang(pace: Path) -> Path:
    return pace.with_suffix(".hang")
