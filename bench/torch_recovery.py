"""How fast a PyTorch loop goes on after a ``kill -9``: ``python bench/torch_recovery.py [KILLS]``.

Three ranks of `_torch_loop.py`, then torchrun with three ranks that all-reduce as many gradients
with gloo. What is measured, and how, is that of `recovery.py`.
"""

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import _gang
import recovery
import timeline
from _services import Services

RANKS = 3
KILLS = 20
SETTLE_SECONDS = 1.0


def main(kills: int) -> None:
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: nothing to measure")
        return
    directory = Path(tempfile.mkdtemp(prefix="muster-trace-"))
    trace = recovery.Trace(directory / "trace", RANKS, SETTLE_SECONDS)
    with Services(environ={"MUSTER_TRACE": str(directory / "trace")}) as services:
        services.post(
            "/jobs",
            {
                "job_id": "torch",
                "mode": "synchronous",
                "command": [sys.executable, str(Path(__file__).with_name("_torch_loop.py"))],
                "world_size": RANKS,
                "checkpoint_every": 1_000_000,
            },
        )
        recovery.kill_ranks(trace, kills)
        services.post("/jobs/torch/stop", {})
    timeline.main(directory / "trace")
    shutil.rmtree(directory)
    recovery.show("torchrun with gloo: kill -9 -> next step", _gang.recoveries(RANKS), "")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else KILLS)
