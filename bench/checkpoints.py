"""What a durable checkpoint costs over the system calls it is made of.

    python bench/checkpoints.py [directory]

Three questions, each against a bare script, interleaved, medians: a small state against the same
calls in the same order; 100 MB against write + fsync + rename + fsync of the directory; and how
many small checkpoints four ranks make durable per second in all. The figures are the disk's of the
directory (the working directory if none is named) as much as ours: read the ratios.
"""

import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from muster.checkpoints.manager import CheckpointManager
from muster.checkpoints.manifest import Owner
from muster.checkpoints.store import open_store
from muster.contracts.shards import Position

RANKS = 4
RANK_SAVES = 200
SMALL_SAVES = 300
LARGE_SAVES = 7

SMALL = {"weights": np.ones((64, 18)), "bias": np.ones(80, np.float64), "loss": 0.5}
LARGE = {"weights": np.random.default_rng(0).random(13_107_200)}


def vault(directory: Path, rank: int = 0) -> CheckpointManager:
    return CheckpointManager(
        store=open_store(directory / f"worker_{rank}", print),
        owner=Owner(job_id="bench", job_uid="uid", rank=rank, world_size=RANKS, generation=0),
        keep_last=3,
        clock=lambda: datetime.now(UTC),
        warn=print,
    )


def vault_saves(directory: Path, state: dict[str, object]) -> Callable[[int], None]:
    ours = vault(directory)
    return lambda step: ours.save(step, Position(step=step), state) and None


def bare_small_saves(directory: Path, sizes: tuple[int, int]) -> Callable[[int], None]:
    """The calls of one small save in the order of the vault, and nothing else."""
    arrays, manifest = map(bytes, sizes)
    place = str(directory)
    hidden: list[str] = []
    latest = f"{place}/LATEST"
    write_durably(latest, b"step_0000000000.g0000\n")

    def save(step: int) -> None:
        temporary, final = f"{place}/.step_{step}.tmp", f"{place}/step_{step}"
        read(latest)
        if len(hidden) > 1:
            temporary = hidden.pop(0)
            write_over(f"{temporary}/state.safetensors", arrays)
            write_over(f"{temporary}/manifest.json", manifest)
        else:
            os.mkdir(temporary, 0o700)  # noqa: PTH102  the bare call is what is measured
            write_durably(f"{temporary}/state.safetensors", arrays)
            write_durably(f"{temporary}/manifest.json", manifest)
            flush_directory(temporary)
        os.rename(temporary, final)  # noqa: PTH104  the bare call is what is measured
        flush_directory(place)
        read(latest)
        write_durably(f"{latest}.tmp", b"step_0000000000.g0000\n")
        os.rename(f"{latest}.tmp", latest)  # noqa: PTH104  the bare call is what is measured
        flush_directory(place)
        if step >= 3:
            hidden.append(f"{place}/.step_{step - 3}.tmp")
            os.rename(f"{place}/step_{step - 3}", hidden[-1])  # noqa: PTH104  as above

    return save


def bare_large_saves(directory: Path, state: dict[str, np.ndarray]) -> Callable[[int], None]:
    """The shortest durable way to the disk: no checksum, no manifest, one file replaced."""
    data = memoryview(state["weights"]).cast("B")

    def save(_step: int) -> None:
        write_durably(f"{directory}/state.tmp", data)
        os.rename(f"{directory}/state.tmp", f"{directory}/state")  # noqa: PTH104  as above
        flush_directory(str(directory))

    return save


def write_durably(path: str, data: bytes | memoryview) -> None:
    fill(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), data)


def write_over(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.fstat(descriptor)
    fill(descriptor, data)


def fill(descriptor: int, data: bytes | memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
    os.fdatasync(descriptor)
    os.close(descriptor)


def read(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.read(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)


def flush_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fsync(descriptor)
    os.close(descriptor)


def interleaved(
    ours: Callable[[int], None], bare: Callable[[int], None], count: int
) -> tuple[float, float]:
    """Return the median seconds of each; they take turns, so that both meet the same disk."""
    seconds: dict[Callable[[int], None], list[float]] = {ours: [], bare: []}
    for step in range(count):
        # Who comes second finds the disk's cache busy with the first: they take turns in that too.
        for save in (ours, bare) if step % 2 else (bare, ours):
            start = time.perf_counter()
            save(step)
            seconds[save].append(time.perf_counter() - start)
    return statistics.median(seconds[ours]), statistics.median(seconds[bare])


def rank_process(directory: Path, rank: int, start: object, bare: object) -> None:
    if bare:
        place = directory / f"bare_{rank}"
        place.mkdir(parents=True)
        save = bare_small_saves(place, (10_000, 600))
    else:
        ours = vault(directory, rank)
        save = lambda step: ours.save(step, Position(step=step), SMALL)  # noqa: E731  as above
    start.wait()
    for step in range(RANK_SAVES):
        save(step)


def checkpoints_per_second(directory: Path, *, bare: bool) -> float:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(RANKS + 1)
    ranks = [
        context.Process(target=rank_process, args=(directory, rank, start, bare))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    start.wait()
    began = time.perf_counter()
    for process in ranks:
        process.join()
    return RANKS * RANK_SAVES / (time.perf_counter() - began)


def main(directory: Path) -> None:
    bare_small, bare_large = directory / "bare_small", directory / "bare_large"
    bare_small.mkdir()
    bare_large.mkdir()
    print(f"{'':28}{'vault':>12}{'bare':>12}{'ratio':>8}")
    sizes = (SMALL["weights"].nbytes + SMALL["bias"].nbytes + 160, 560)
    ours, bare = interleaved(
        vault_saves(directory / "small", SMALL), bare_small_saves(bare_small, sizes), SMALL_SAVES
    )
    print(f"{'10 KB, ms':28}{ours * 1e3:12.3f}{bare * 1e3:12.3f}{ours / bare:8.2f}")
    ours, bare = interleaved(
        vault_saves(directory / "large", LARGE), bare_large_saves(bare_large, LARGE), LARGE_SAVES
    )
    print(f"{'100 MB, ms':28}{ours * 1e3:12.1f}{bare * 1e3:12.1f}{ours / bare:8.2f}")
    ours = checkpoints_per_second(directory / "ranks", bare=False)
    bare = checkpoints_per_second(directory / "ranks", bare=True)
    print(f"{'four ranks, checkpoints/s':28}{ours:12.0f}{bare:12.0f}{bare / ours:8.2f}")


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp(prefix="bench_", dir=sys.argv[1] if len(sys.argv) > 1 else "."))
    try:
        main(place)
    finally:
        shutil.rmtree(place)
