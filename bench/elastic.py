"""What training together costs, and how fast it regroups: ``python bench/elastic.py``.

First without a service: CPU time against a loop that adds gradients up as they come, and a step of
two ranks against one. Then through the whole system, with steps of 20 ms and a million parameters:
ranks are killed, replaced, added and taken away, and every rank writes down when it took which
step. What a change costs is the longest time between two steps of a survivor, less a usual one. A
second job, with 100 MB of weights, is only scaled.
"""

import importlib.util
import os
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import _gang
import _ranks
from _programs import TIME
from _services import Services

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset

REPETITIONS = 9
BATCH_SIZE = 256
DEAR_BATCH_SIZE = 1024
KILLS = 12
CHANGES = 6
PAUSE_SECONDS = 0.02
SETTLE_SECONDS = 1.0
"""Of undisturbed training, before a change and after it."""

HAS_GLOO = importlib.util.find_spec("torch") is not None

Steps = Mapping[int, float]
"""When a rank took which step."""


def main() -> None:
    with Services() as services:
        data = services.root / "data"
        samples = _ranks.STEPS * BATCH_SIZE
        write_dataset(data, synthetic(samples=samples, shards=4, features=64, classes=10, seed=0))
        costs(data)
        speed(data)
        job = Job(services, "Wide", (2, 4))
        job.kills()
        job.changes("4 MB")
        job.end()
        huge = Job(services, "Huge", (1, 2))
        huge.changes("100 MB")
        huge.end()
    if HAS_GLOO:
        show("torchrun with gloo: kill -9 -> first step, p50, ms", _gang.recoveries(), "-", 1e3)
    else:
        print("torch is not installed: torchrun with gloo is left out")


def costs(data: Path) -> None:
    for world_size in (1, 2, 4):
        found = [_ranks.run("beside", data, BATCH_SIZE, world_size) for _ in range(REPETITIONS)]
        ratios = [cost.cpu / cost.plain_cpu for cost in found]
        show(f"CPU time ÷ plain accumulation, {world_size} ranks", ratios, "<= 1.03")


def speed(data: Path) -> None:
    ratios = []
    for _ in range(REPETITIONS):
        alone, together = (
            _ranks.run("alone", data, DEAR_BATCH_SIZE, size).clock for size in (1, 2)
        )
        ratios.append(alone / together)
    show("a step of one rank ÷ that of two", ratios, ">= 1.8")


class Job:
    """A job that goes on for as long as it is wanted, with one of two numbers of ranks."""

    def __init__(self, services: Services, program: str, sizes: tuple[int, int]) -> None:
        """Start it with the larger number."""
        self._services = services
        self._id = program.lower()
        self._sizes = sizes
        self._program = services.root / "_programs.py"
        shutil.copy(Path(__file__).with_name("_programs.py"), self._program)
        services.post(
            "/jobs",
            {
                "job_id": self._id,
                "mode": "synchronous",
                "program": f"{self._program}:{program}",
                "world_size": max(sizes),
                "batch_size": 16,
                "virtual_shards": 2 * max(sizes),
                "epochs": 100_000,
                "checkpoint_every": 1_000_000,
                "sleep_sec": PAUSE_SECONDS,
            },
        )
        self._wait_for_ranks(max(sizes))

    def kills(self) -> None:
        """Kill one rank after the other, each when all four train."""
        stalls, joins, joined_stalls = [], [], []
        for number in range(KILLS):
            before = self._wait_for_ranks(4)
            time.sleep(SETTLE_SECONDS)
            victim = sorted(before)[number % 4]
            killed_at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            (newcomer,) = self._wait_for_ranks(4, without=victim).keys() - before.keys()
            time.sleep(SETTLE_SECONDS)
            usual = usual_seconds(self._steps(victim), killed_at)
            survivors = [self._steps(pid) for pid in before if pid != victim]
            new = self._steps(newcomer)
            joined_at = min(new.values())
            stalls.append(max(longest(it, killed_at, killed_at + 0.4) for it in survivors) - usual)
            joins.append(joined_at - killed_at - usual)
            joined_stalls.append(
                max(longest(it, joined_at - 0.05, joined_at + 0.4) for it in survivors) - usual
            )
        show(
            "kill -9 -> next step of the survivors, beyond a usual one, p50, ms",
            stalls,
            "<= 50",
            1e3,
        )
        show("  the same, p95", [p95(stalls)], "<= 200", 1e3)
        show(
            "kill -9 -> first step of the replacement, less a usual one, p50, ms",
            joins,
            "<= 100",
            1e3,
        )
        show("survivors wait for the replacement, p50, ms", joined_stalls, "-", 1e3)

    def changes(self, weights: str) -> None:
        few, many = self._sizes
        grown, shrunk = [], []
        for _ in range(CHANGES):
            shrunk.append(self._scale(few))
            grown.append(self._scale(many))
        stall = f"{weights}: survivors stall, in usual steps, p50"
        show(f"{many} -> {few} ranks, {stall}", shrunk, "<= 1")
        show(f"{few} -> {many} ranks, {stall}", grown, "<= 1")

    def end(self) -> None:
        self._services.post(f"/jobs/{self._id}/stop", {})
        self._services.wait_for(self._id, "STOPPED")

    def _scale(self, world_size: int) -> float:
        """Return the longest time between two steps of those who stay, in usual steps."""
        before = self._wait_for_ranks(sum(self._sizes) - world_size)
        time.sleep(SETTLE_SECONDS)
        asked_at = time.monotonic()
        self._services.patch(f"/jobs/{self._id}", {"world_size": world_size})
        after = self._wait_for_ranks(world_size)
        time.sleep(SETTLE_SECONDS)
        stay = [self._steps(pid) for pid in before.keys() & after.keys()]
        usual = usual_seconds(stay[0], asked_at)
        return max(longest(it, asked_at, time.monotonic()) for it in stay) / usual - 1

    def _wait_for_ranks(self, count: int, without: int | None = None) -> dict[int, int]:
        """Return pids and ranks once exactly so many have taken steps, none of them `without`."""
        while True:
            summary = self._services.get(f"/jobs/{self._id}/summary")
            if summary["status"] == "FAILED":
                raise RuntimeError(f"the job failed: {summary}")
            living = {it["pid"]: it["rank"] for it in summary["workers"] if it["pid"] is not None}
            settled = len(living) == count and without not in living
            if settled and all(self._has_begun(pid) for pid in living):
                return living
            time.sleep(0.02)

    def _has_begun(self, pid: int) -> bool:
        file = self._file(pid)
        return file.exists() and file.stat().st_size > 0

    def _steps(self, pid: int) -> Steps:
        return dict(TIME.iter_unpack(self._file(pid).read_bytes()))

    def _file(self, pid: int) -> Path:
        return self._program.with_name(f"{pid}.steps")


def intervals(steps: Steps, start: float, stop: float) -> Iterator[float]:
    """Yield the times between steps that end or begin in [start, stop]."""
    moments = sorted(steps.values())
    for before, after in pairwise(moments):
        if after >= start and before <= stop:
            yield after - before


def longest(steps: Steps, start: float, stop: float) -> float:
    return max(intervals(steps, start, stop))


def usual_seconds(steps: Steps, until: float) -> float:
    """Return what a step took before something was changed."""
    return statistics.median(intervals(steps, until - 0.8 * SETTLE_SECONDS, until - 0.1))


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def show(what: str, values: list[float], goal: str, factor: float = 1.0) -> None:
    low, middle, high = min(values), statistics.median(values), max(values)
    spread = "" if len(values) == 1 else f"   ({factor * low:.2f} .. {factor * high:.2f})"
    print(f"{what:<70} {factor * middle:>8.2f}   {goal:8}{spread}", flush=True)


if __name__ == "__main__":
    main()
