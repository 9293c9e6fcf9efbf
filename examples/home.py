"""A script that trains on machines at home: any of them may be switched off, and come back.

Once, on both machines: `pip install '.[home]'`; on one `muster mesh secret`, on the other
`muster mesh join`. Each machine has a copy of the data, here made the same on both:

    muster dataset synthetic --out data/points --samples 20000 --shards 4
    DATASET_DIR=data/points python examples/home.py

The one that is left waits for the other, and both go on from their newest checkpoint.
"""

import sys

import numpy as np

import muster
from muster.collectives import DistributedContext
from muster.mesh import PeerGone, discover

LEARNING_RATE = 0.05
BATCH_SIZE = 96
FEATURES = 16
WAIT_SECONDS = 600


def train(run, backend):
    """Train until the end of the data, or until the process is asked to stop."""
    state = run.restore(backend=backend)
    if state is None:  # the same on all members
        state = {"weights": np.zeros(FEATURES), "bias": np.zeros(1)}
        run.checkpoint(state)
    print(f"rank {run.rank} of {run.world_size} begins after step {run.steps_done}", flush=True)
    context = DistributedContext(backend)
    for batch in run.batches(BATCH_SIZE):  # the same on all members; each takes its part
        part = batch[run.rank :: run.world_size]
        inputs = np.array([sample["x"] for sample in part]).reshape(-1, FEATURES)
        positive = np.array([sample["y"] == 0 for sample in part], float)

        # Logistic regression: is it class 0 or not?
        chance = 1 / (1 + np.exp(-(inputs @ state["weights"] + state["bias"])))
        loss = -np.log(np.where(positive == 1, chance, 1 - chance) + 1e-12).sum()
        slope = chance - positive
        sums = context.all_reduce(np.array([*(inputs.T @ slope), slope.sum(), loss]))

        means = sums / len(batch)
        state["weights"] -= LEARNING_RATE * means[:FEATURES]
        state["bias"] -= LEARNING_RATE * means[FEATURES]
        run.step(loss=means[-1])
        if run.should_checkpoint or run.should_stop:
            run.checkpoint(state)
        if run.should_stop:
            return
    run.checkpoint(state)
    print(f"ends after step {run.steps_done} with a bias of {state['bias'][0]}", flush=True)


backend = discover(peers=int(sys.argv[1]) if sys.argv[1:] else 1, timeout_seconds=WAIT_SECONDS)
run = muster.join(backend=backend)
while not (run.is_complete or run.should_stop):
    try:
        train(run, backend)
    except PeerGone as gone:
        print(gone, flush=True)
        backend = discover(after=backend, timeout_seconds=WAIT_SECONDS)
backend.close()
