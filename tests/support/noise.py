"""A managed program with more elements than ranks of several hosts send each other whole."""

import numpy as np

from muster.program import Batch, Contribution, State

ELEMENTS = 20_000


class Noise:
    def initial(self, seed: int) -> dict[str, np.ndarray]:
        return {"w": np.random.default_rng(seed).standard_normal(ELEMENTS, np.float32)}

    def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
        away = state["w"] - random.standard_normal(ELEMENTS, np.float32)
        weight = batch.weights.sum(dtype=np.float32)
        return Contribution({"w": weight * away}, float(weight * (away @ away)), {})

    def update(self, state: State, gradients: State, _step: int) -> dict[str, np.ndarray]:
        return {"w": state["w"] - np.float32(0.1) * gradients["w"]}
