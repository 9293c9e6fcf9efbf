"""The programs of a chaos run; they count the lines that they print.

After each line its number goes into a page of shared memory, which survives the process. So the
number of lines that a killed rank has written is known, and its log must hold all of them. Run as
a script, this file trains independent ranks.
"""

import mmap
import os
import subprocess
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

import muster
from muster.program import Batch, Contribution

SLEEPER_SECONDS = "7774"

Arrays = Mapping[str, np.ndarray]


def witness_directory(checkpoint_dir: Path) -> Path:
    return checkpoint_dir.parent / "witnesses"


class Witness:
    """Prints numbered lines and counts them in a file named after the process."""

    def __init__(self) -> None:
        self._count = 0

    def says_a_line(self) -> None:
        # A single write, so a kill never leaves half a line.
        os.write(1, f"line {self._count} of {self._name}\n".encode())
        self._count += 1
        self._memory[:8] = self._count.to_bytes(8, "little")

    @cached_property
    def _name(self) -> str:
        job_id, rank = os.environ["JOB_ID"], os.environ["RANK"]
        return f"{job_id}.{rank}.{os.getpid()}.{time.monotonic_ns()}"

    @cached_property
    def _memory(self) -> mmap.mmap:
        directory = witness_directory(Path(os.environ["CHECKPOINT_DIR"]))
        directory.mkdir(exist_ok=True)
        path = directory / self._name
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), 8)


class Numbered:
    """A regression with momentum and noise, synchronous."""

    def __init__(self) -> None:
        self._witness = Witness()

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        weights = np.random.default_rng(seed).standard_normal(8).astype(np.float32)
        return {"weights": weights, "momentum": np.zeros(8, np.float32)}

    def gradient(self, state: Arrays, batch: Batch, random: np.random.Generator) -> Contribution:
        self._witness.says_a_line()
        inputs = np.array([sample["x"] for sample in batch.samples], np.float32)
        inputs += random.normal(0, 0.01, inputs.shape).astype(np.float32)
        wanted = np.array([sample["y"] for sample in batch.samples], np.float32)
        errors = (inputs @ state["weights"] - wanted) * batch.weights
        return Contribution({"weights": inputs.T @ errors}, float(errors @ errors))

    def update(self, state: Arrays, gradients: Arrays, _step: int) -> dict[str, np.ndarray]:
        momentum = np.float32(0.9) * state["momentum"] + gradients["weights"]
        return {"weights": state["weights"] - np.float32(0.05) * momentum, "momentum": momentum}


def main() -> None:
    """Train as one rank, with a sleeping child in another session."""
    # It sleeps for hours, so it has to be killed together with the rank.
    subprocess.Popen(["sleep", SLEEPER_SECONDS], start_new_session=True)  # noqa: S607
    witness = Witness()
    run = muster.join()
    state = run.restore() or {}
    for batch in run.batches():
        witness.says_a_line()
        inputs = np.array([sample["x"] for sample in batch])
        wanted = np.array([sample["y"] for sample in batch], float)
        weights = state.get("weights", np.zeros(inputs.shape[1]))
        errors = inputs @ weights - wanted
        state["weights"] = weights - 0.01 * inputs.T @ errors / len(batch)
        run.step(loss=float(errors @ errors))
        if run.should_checkpoint or run.should_stop:
            run.checkpoint(state)
        if run.should_stop:
            return
        run.rest(run.settings.sleep_sec)
    run.checkpoint(state)


if __name__ == "__main__":
    main()
