"""The programs of a chaos run; they count the lines that they print.

Run as a script, this file trains independent ranks.
"""

import os
import subprocess
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

import muster
from muster.program import Batch, Contribution
from stress.witness import Witness

SLEEPER_SECONDS = "7774"

Arrays = Mapping[str, np.ndarray]


class Lines:
    """Prints numbered lines, from the first on in the process that prints."""

    @cached_property
    def _witness(self) -> Witness:
        return Witness(
            Path(os.environ["WITNESSES"]), f"{os.environ['JOB_ID']}.{os.environ['RANK']}"
        )

    def print_one(self) -> None:
        (line,) = self._witness.next_lines(1)
        os.write(1, line + b"\n")  # a single write, so a kill never leaves half a line
        self._witness.wrote(1)


class Numbered:
    """A regression with momentum and noise, synchronous."""

    def __init__(self) -> None:
        self._lines = Lines()

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        weights = np.random.default_rng(seed).standard_normal(8).astype(np.float32)
        return {"weights": weights, "momentum": np.zeros(8, np.float32)}

    def gradient(self, state: Arrays, batch: Batch, random: np.random.Generator) -> Contribution:
        self._lines.print_one()
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
    lines = Lines()
    run = muster.join()
    state = run.restore() or {}
    for batch in run.batches():
        lines.print_one()
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
