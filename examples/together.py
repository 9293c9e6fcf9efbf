"""A program for synchronous training: one model on all ranks, whatever becomes of them.

Three pure functions are all there is to write. Muster calls `gradient` for small parts of the
batch on whatever rank, adds the results up in an order that never changes, and calls `update`
everywhere, so the weights have the same bits for every number of ranks.
"""

import numpy as np

from muster.program import Batch, Contribution

LEARNING_RATE = np.float32(0.3)


class Points:
    """Softmax regression on samples such as ``{"x": [0.1, …], "y": 3}`` of sixteen features."""

    def initial(self, seed):
        random = np.random.default_rng(seed)
        return {"weights": random.normal(0, 0.1, (16, 4)).astype(np.float32)}

    def gradient(self, state, batch: Batch, _random):
        inputs = np.array([sample["x"] for sample in batch.samples], np.float32)
        labels = np.array([sample["y"] for sample in batch.samples])
        rows = np.arange(len(labels))

        scores = inputs @ state["weights"]
        scores -= scores.max(axis=1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(axis=1, keepdims=True)
        losses = -np.log(shares[rows, labels])

        shares[rows, labels] -= 1
        # Sums over the samples, each times its weight: Muster divides by the total weight.
        slope = shares * batch.weights[:, None]
        return Contribution({"weights": inputs.T @ slope}, loss=float(losses @ batch.weights))

    def update(self, state, gradients, _step):
        return {"weights": state["weights"] - LEARNING_RATE * gradients["weights"]}
