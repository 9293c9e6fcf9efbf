"""A step of `muster.torch` against DDP and plain training: ``python bench/pytorch.py [ROUNDS]``.

All sides compute the same eight micro-batches a step, with one thread a rank, and take turns: a
round starts each once, for as many seconds. DDP adds gradients up without a reduction in all but
the last of them. A ratio is that of the median steps of one round; the median of the rounds is
printed, and the seconds in checks ÷ the seconds in steps, from step 1 on, of the last round.
"""

import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

MODELS = ("mlp", "mlp, large batch", "gpt", "cnn")
DDP_GOALS = {"mlp": "<= 0.92", "gpt": "<= 1.0", "cnn": "<= 1.0"}
PLAIN_GOALS = {"mlp, large batch": "<= 1.05", "gpt": "<= 1.05", "cnn": "<= 1.05"}
RANKS = str(Path(__file__).with_name("_torch_ranks.py"))

ELASTIC = ("-m", "muster", "run", "--python", sys.executable, "--elastic", "-n")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SIDES = {
    "managed": (*ELASTIC, "2"),
    "ddp": (*TORCHRUN, "2"),
    "managed alone": (),
    "plain": (),
}


def main() -> None:
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: nothing to measure")
        return
    rounds = int(sys.argv[1]) if sys.argv[1:] else 1
    for model in MODELS:
        measured = [{side: measure(side, model) for side in SIDES} for _ in range(rounds)]
        found = [{side: it.step_seconds for side, it in one.items()} for one in measured]
        for one, other, goals in (
            ("managed", "ddp", DDP_GOALS),
            ("managed alone", "plain", PLAIN_GOALS),
        ):
            ratios = [it[one] / it[other] for it in found]
            usual_ms = statistics.median(it[other] for it in found) * 1e3
            print(
                f"{model}: a step {one} ÷ {other} ({usual_ms:.0f} ms)".ljust(56),
                f"{statistics.median(ratios):.2f}   {goals.get(model, '-'):8}"
                f" ({min(ratios):.2f} .. {max(ratios):.2f})"
                f"   checks {measured[-1][one].checks}",
                flush=True,
            )


class Measured(NamedTuple):
    """One run of a side."""

    step_seconds: float
    """The median."""
    checks: str
    """What they took, and of how many steps."""


def measure(side: str, model: str) -> Measured:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as root:
        result = Path(root) / "result"
        ended = subprocess.run(
            [sys.executable, *SIDES[side], RANKS, side.removesuffix(" alone"), model, str(result)],
            cwd=root,  # not to resume from checkpoints of another run
            env=os.environ | {"OMP_NUM_THREADS": "1", "MUSTER_DATA_DIR": root},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ended.returncode:
            sys.exit(f"{side} with {model} failed:\n{ended.stdout[-2000:]}")
        # Steps and costs, in the words of the trainer: a short run has no check after its first.
        costs = re.search(r"step (\d+)/\d+ .*; checks took .* and (\S+) since", ended.stdout)
        checks = f"{costs[2]} of {costs[1]} steps" if costs else "-"
        return Measured(float(result.read_text()), checks)


if __name__ == "__main__":
    main()
