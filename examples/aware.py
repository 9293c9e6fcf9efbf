"""A script that says `import muster`: exact resume, durable checkpoints, progress, a clean stop.

    {"command": ["python", "examples/aware.py"], "world_size": 2, "epochs": 5,
     "dataset_dir": "data/points"}

Kill any of its ranks with SIGKILL: it goes on from the very sample after its last checkpoint, and
ends with the same bits. It also runs by itself:

    muster dataset synthetic --out data/points --samples 20000 --shards 4
    DATASET_DIR=data/points python examples/aware.py
"""

import numpy as np

import muster

LEARNING_RATE = 0.05

run = muster.join()
state = run.restore() or {}
print(f"one of {run.world_size} ranks begins after step {run.steps_done}", flush=True)

for batch in run.batches():
    inputs = np.array([sample["x"] for sample in batch])
    positive = np.array([sample["y"] == 0 for sample in batch], dtype=float)
    if not state:
        state = {"weights": np.zeros(inputs.shape[1]), "bias": np.zeros(1)}

    # Logistic regression: is it class 0 or not?
    chance = 1 / (1 + np.exp(-(inputs @ state["weights"] + state["bias"])))
    loss = -np.mean(np.log(np.where(positive == 1, chance, 1 - chance) + 1e-12))
    slope = (chance - positive) / len(batch)
    state["weights"] -= LEARNING_RATE * (inputs.T @ slope)
    state["bias"] -= LEARNING_RATE * slope.sum()

    run.step(loss=loss)
    if run.should_checkpoint or run.should_stop:
        run.checkpoint(state)
    if run.should_stop:
        break
    run.rest(run.settings.sleep_sec)
else:
    if state:
        run.checkpoint(state)

print(f"one of {run.world_size} ranks ends after step {run.steps_done}", flush=True)
