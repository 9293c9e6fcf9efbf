"""Ranks under torchrun with gloo, which restarts all of them after a loss: to compare with.

python bench/_gang.py DIRECTORY SECONDS   (one of its ranks; processor time of a step)
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from _programs import TIME

RANKS = 2
KILLS = 5
ELEMENTS = 1_000_000
PAUSE_SECONDS = 0.02
STEPS_BEFORE = 20
CHECKPOINT_EVERY = 5
PATIENCE_SECONDS = 60.0

SOUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, a restarted gang may read what the last one has left, and hang."""


def recoveries(ranks: int = RANKS) -> list[float]:
    """Return the seconds from each kill -9 to the first step after all ranks restarted."""
    with _torchrun(ranks) as root:
        return [_recovery(root, ranks) for _ in range(KILLS)]


def speed(ranks: int, step_seconds: float, kills_per_second: float, seconds: float) -> float:
    """Return the saved steps per second while a random rank is killed every so often."""
    with _torchrun(ranks, step_seconds) as root:
        _wait_for_gang(root, set(), STEPS_BEFORE, ranks)
        began, first, kills = time.monotonic(), _saved_step(root), 0
        while (elapsed := time.monotonic() - began) < seconds:
            if elapsed * kills_per_second > kills + 1:
                kills += 1
                alive = [int(it.stem) for it in root.glob("*.steps") if _is_alive(int(it.stem))]
                with suppress(ProcessLookupError, IndexError):
                    os.kill(random.choice(alive), signal.SIGKILL)  # noqa: S311
            time.sleep(0.01)
        return (_saved_step(root) - first) / elapsed


@contextmanager
def _torchrun(ranks: int, step_seconds: float = 0.0) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as root:
        options = [f"--nproc-per-node={ranks}", "--standalone", "--max-restarts=1000"]
        program = [__file__, root, str(step_seconds)]
        torchrun = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *program],
            env=os.environ | SOUND | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Path(root)
        finally:
            torchrun.terminate()
            torchrun.wait()


def _saved_step(root: Path) -> int:
    return int((root / "saved").read_text())


def _recovery(root: Path, ranks: int) -> float:
    known = {file for file in root.glob("*.steps") if not _is_alive(int(file.stem))}
    before = _wait_for_gang(root, known, STEPS_BEFORE, ranks)
    killed_at = time.monotonic()
    os.kill(int(before[0].stem), signal.SIGKILL)
    after = _wait_for_gang(root, known | set(before), 1, ranks)
    return max(next(TIME.iter_unpack(file.read_bytes()))[1] for file in after) - killed_at


def _wait_for_gang(root: Path, known: set[Path], steps: int, ranks: int) -> list[Path]:
    """Return the files of a new gang, once each of its ranks has taken so many steps."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        files = [file for file in root.glob("*.steps") if file not in known]
        if len([file for file in files if file.stat().st_size >= steps * TIME.size]) == ranks:
            return files
        time.sleep(0.01)
    raise TimeoutError(f"torchrun has not brought its gang back within {PATIENCE_SECONDS:g} s")


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def main(root: Path, step_seconds: float) -> None:
    import torch  # noqa: PLC0415  an optional peer

    torch.distributed.init_process_group("gloo")
    vector, saved = torch.zeros(ELEMENTS), root / "saved"
    step = _saved_step(root) if saved.exists() else 0
    with (root / f"{os.getpid()}.steps").open("ab", buffering=0) as times:
        while True:
            until = time.thread_time() + step_seconds
            while time.thread_time() < until:
                pass
            torch.distributed.all_reduce(vector)
            times.write(TIME.pack(step, time.monotonic()))
            step += 1
            if torch.distributed.get_rank() == 0 and step % CHECKPOINT_EVERY == 0:
                torch.save(vector, root / "state.pt")
                (root / "saved.new").write_text(str(step))
                (root / "saved.new").replace(saved)
            if not step_seconds:
                time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
