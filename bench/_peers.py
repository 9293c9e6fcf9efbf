"""Ranks that compare Muster with gloo and OpenMPI: their start, their peers and their clock.

All take turns in the same processes, in an order by chance that all ranks share. OpenMPI spins only
inside its calls, and gloo's thread sleeps, so a side that is idle takes no time from the others.
"""

import importlib.util
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Backend
from muster.collectives.operations import all_gather_bytes

SIZES_BYTES: Final = {
    "4 KB": 4 << 10,
    "64 KB": 64 << 10,
    "1 MB": 1 << 20,
    "16 MB": 16 << 20,
    "100 MB": 100 << 20,
}

HAS_GLOO: Final = importlib.util.find_spec("torch") is not None
HAS_MPI: Final = importlib.util.find_spec("mpi4py") is not None and bool(shutil.which("mpirun"))

ENVIRON: Final = os.environ | {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # torch renames its operations
}

Call = Callable[[], object]


def say_what_is_absent() -> None:
    for name, is_here in (("gloo (torch)", HAS_GLOO), ("OpenMPI (mpi4py)", HAS_MPI)):
        if not is_here:
            print(f"{name} is not installed: left out")


def launch(script: str, arguments: list[str], world_size: int) -> int:
    """Run the ranks, by mpirun if there is one, and return the worst exit code."""
    command = [sys.executable, script, "rank", *arguments]
    if HAS_MPI:
        options = ["--oversubscribe", "--bind-to", "none", "-n", str(world_size)]
        as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        mpirun = shutil.which("mpirun") or "mpirun"
        command = [mpirun, *as_root, *options, *command]
        return subprocess.run(command, env=ENVIRON, check=False).returncode
    ranks = [
        subprocess.Popen(command, env=ENVIRON | {"RANK": str(rank), "WORLD_SIZE": str(world_size)})
        for rank in range(world_size)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def place() -> tuple[int, int]:
    """Return the rank of this process and the world size."""
    environ = os.environ
    return (
        int(environ.get("OMPI_COMM_WORLD_RANK") or environ["RANK"]),
        int(environ.get("OMPI_COMM_WORLD_SIZE") or environ["WORLD_SIZE"]),
    )


def join_gloo(store: Path, rank: int, world_size: int, interface: str = "lo") -> Any:
    """Return torch with its group of all ranks, or None without torch."""
    if not HAS_GLOO:
        return None
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch.distributed  # noqa: PLC0415  an optional peer

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    return torch


def measure(
    backend: Backend, calls: Mapping[str, Call], rounds: int, repeats: int = 1
) -> dict[str, float]:
    """Return the median seconds of each call, over the slowest ranks of the rounds."""
    order = [name for name in calls for _ in range(rounds)]
    random.Random(0).shuffle(order)  # noqa: S311  the same on all ranks
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name in [*calls, *order]:  # the first of each warms up
        backend.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            calls[name]()
        seconds[name].append((time.perf_counter() - began) / repeats)
    return {name: median(slowest(backend, np.array(it[1:]))) for name, it in seconds.items()}


def slowest(backend: Backend, times: NDArray[np.float64]) -> list[float]:
    """Return the longest time of all ranks, for each round."""
    gathered = all_gather_bytes(backend, times.tobytes())
    return list(np.max([np.frombuffer(own, times.dtype) for own in gathered], axis=0))


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def ratio(value: float | None, *, least: float | None = None, most: float | None = None) -> str:
    """Return a ratio and its goal, marked where it is missed."""
    if value is None:
        return "-"
    goal = f" (≥ {least:g})" if least else f" (≤ {most:g})" if most else ""
    is_missed = (least and value < least) or (most and value > most)
    return f"{value:.2f}{goal}{' !' if is_missed else ''}"
