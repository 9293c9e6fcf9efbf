"""What ranks of this harness run; each registers its slow exit handler before it joins.

Run as a script with the name of a kind. The last word of the job's id says how many seconds the
handler takes.
"""

import atexit
import ctypes
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np

import muster
from muster.program import Batch, Contribution

EXAMPLES = Path(__file__).parents[2] / "examples"

STEP_SECONDS = 0.05
"""Of a rank that waits to be struck."""

Arrays = Mapping[str, np.ndarray]


class Regression:
    """A regression, synchronous."""

    def __init__(self) -> None:
        exit_slowly()

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        return {"weights": np.random.default_rng(seed).standard_normal(8).astype(np.float32)}

    def gradient(self, state: Arrays, batch: Batch, _random: np.random.Generator) -> Contribution:
        inputs = np.array([sample["x"] for sample in batch.samples], np.float32)
        wanted = np.array([sample["y"] for sample in batch.samples], np.float32)
        errors = (inputs @ state["weights"] - wanted) * batch.weights
        return Contribution({"weights": inputs.T @ errors}, float(errors @ errors))

    def update(self, state: Arrays, gradients: Arrays, _step: int) -> dict[str, np.ndarray]:
        return {"weights": state["weights"] - np.float32(0.05) * gradients["weights"]}


def exit_slowly() -> None:
    """Register what a tracker registers, which sends its last rows when the process exits."""
    atexit.register(time.sleep, float(os.environ["JOB_ID"].rpartition("-")[2]))


def train() -> None:
    run = muster.join()
    state = run.restore() or {"weights": np.ones(8)}
    for batch in run.batches():
        inputs = np.array([sample["x"] for sample in batch])
        state["weights"] = np.sin(state["weights"] + inputs.sum(axis=0))
        run.step()
        if run.should_checkpoint:
            run.checkpoint(state)
    run.checkpoint(state)


def train_and_fail() -> None:
    train()
    sys.exit(3)


def compute() -> None:
    """Compute without Muster."""
    weights = np.ones((64, 64))
    for step in range(2000):
        weights = np.sin(weights @ weights + step)
    print(f"sha256 {sha256(weights.tobytes()).hexdigest()}", flush=True)


def wait_for_strike() -> None:
    """Take steps until the job may end; deadlock with the GIL, once, when told so."""
    job, run = os.environ["JOB_ID"], muster.join()
    while not Path(f"{job}.end").exists():
        run.step()
        time.sleep(STEP_SECONDS)
        if Path(f"{job}.deadlock").exists() and not Path(f"{job}.deadlocked").exists():
            Path(f"{job}.deadlocked").touch()
            ctypes.PyDLL(None).pause()  # a PyDLL keeps the GIL


def example(name: str) -> Callable[[], object]:
    return lambda: runpy.run_path(str(EXAMPLES / name), run_name="__main__")


SCRIPTS: Mapping[str, Callable[[], object]] = {
    "script": train,
    "failing": train_and_fail,
    "command": compute,
    "struck": wait_for_strike,
    "torch": example("torch_elastic.py"),
    "gang": example("ddp.py"),
}

if __name__ == "__main__":
    exit_slowly()
    SCRIPTS[sys.argv[1]]()
