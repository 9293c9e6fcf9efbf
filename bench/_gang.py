"""Recovery of two ranks under torchrun with gloo, which restarts all of them: to compare with.

python bench/_gang.py DIRECTORY        (one of its ranks)
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _programs import TIME

RANKS = 2
KILLS = 5
ELEMENTS = 1_000_000
PAUSE_SECONDS = 0.02
STEPS_BEFORE = 20
PATIENCE_SECONDS = 60.0

SOUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, a restarted gang may read what the last one has left, and hang."""


def recoveries() -> list[float]:
    """Return the seconds from each kill -9 to the first step after all ranks restarted."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as root:
        options = [f"--nproc-per-node={RANKS}", "--standalone", f"--max-restarts={2 * KILLS}"]
        torchrun = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, __file__, root],
            env=os.environ | SOUND | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        try:
            return [_recovery(Path(root)) for _ in range(KILLS)]
        finally:
            torchrun.terminate()
            torchrun.wait()


def _recovery(root: Path) -> float:
    known = {file for file in root.iterdir() if not _is_alive(int(file.stem))}
    before = _wait_for_gang(root, known, STEPS_BEFORE)
    killed_at = time.monotonic()
    os.kill(int(before[0].stem), signal.SIGKILL)
    after = _wait_for_gang(root, known | set(before), 1)
    return max(next(TIME.iter_unpack(file.read_bytes()))[1] for file in after) - killed_at


def _wait_for_gang(root: Path, known: set[Path], steps: int) -> list[Path]:
    """Return the files of a new gang, once each of its ranks has taken so many steps."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        files = [file for file in root.iterdir() if file not in known]
        if len([file for file in files if file.stat().st_size >= steps * TIME.size]) == RANKS:
            return files
        time.sleep(0.01)
    raise TimeoutError(f"torchrun has not brought its gang back within {PATIENCE_SECONDS:g} s")


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def main(root: Path) -> None:
    import torch  # noqa: PLC0415  an optional peer

    torch.distributed.init_process_group("gloo")
    vector = torch.zeros(ELEMENTS)
    with (root / f"{os.getpid()}.steps").open("ab", buffering=0) as times:
        step = 0
        while True:
            torch.distributed.all_reduce(vector)
            times.write(TIME.pack(step, time.monotonic()))
            time.sleep(PAUSE_SECONDS)
            step += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
