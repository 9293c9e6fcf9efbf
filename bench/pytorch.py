"""A step of `muster.torch` against DDP and against plain training: ``python bench/pytorch.py``.

All sides compute the same eight micro-batches a step, with one thread a rank, and take turns: a
round starts each once. DDP adds gradients up without a reduction in all but the last of them. A
ratio is that of the median steps of one round; the median of the rounds is printed.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 5
MODELS = ("mlp", "mlp, large batch", "gpt", "cnn")
DDP_GOALS = {"mlp": "<= 0.92", "gpt": "<= 1.0", "cnn": "<= 1.0"}
PLAIN_GOALS = {"mlp, large batch": "<= 1.05", "gpt": "<= 1.05", "cnn": "<= 1.05"}
RANKS = str(Path(__file__).with_name("_torch_ranks.py"))

ELASTIC = ("-m", "muster", "run", "--elastic", "-n")
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
    for model in MODELS:
        found = [{side: measure(side, model) for side in SIDES} for _ in range(ROUNDS)]
        for one, other, goals in (
            ("managed", "ddp", DDP_GOALS),
            ("managed alone", "plain", PLAIN_GOALS),
        ):
            ratios = [it[one] / it[other] for it in found]
            usual_ms = statistics.median(it[other] for it in found) * 1e3
            print(
                f"{model}: a step {one} ÷ {other} ({usual_ms:.0f} ms)".ljust(56),
                f"{statistics.median(ratios):.2f}   {goals.get(model, '-'):8}"
                f" ({min(ratios):.2f} .. {max(ratios):.2f})",
                flush=True,
            )


def measure(side: str, model: str) -> float:
    """Return the seconds of the median step of one run."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as root:
        result = Path(root) / "result"
        subprocess.run(
            [sys.executable, *SIDES[side], RANKS, side.removesuffix(" alone"), model, str(result)],
            cwd=root,  # not to resume from checkpoints of another run
            env=os.environ | {"OMP_NUM_THREADS": "1", "MUSTER_DATA_DIR": root},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return float(result.read_text())


if __name__ == "__main__":
    main()
