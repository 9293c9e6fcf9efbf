"""How much a job still trains while its ranks are killed: ``python bench/goodput.py``.

Goodput is the committed steps per second of a synchronous job of which a random live rank is killed
every so often, divided by those of the same job left alone. The job has four ranks and 4 MB of
weights, and takes the same number of steps each time; digest and audit have to be those of the
undisturbed run. Steps and their times are those of the durable checkpoints on record. With torch,
torchrun is measured beside it, with kills at a tenth of the lowest rate as well.
"""

import argparse
import importlib.util
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import _gang
from _services import Services

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset

RANKS = 4
BATCH_SIZE = 16
STEPS_PER_EPOCH = 20
STEP_SECONDS = 0.04
WARM_UP_STEPS = 10
LIMIT_SECONDS = 900.0
"""For one job."""


class Kind(NamedTuple):
    """How a step of 40 ms on two cores is made, and the goals by kills per second."""

    program: str
    sleep_seconds: float
    goals: dict[float, float]


KINDS = {
    "40 ms compute": Kind("Busy", 0.0, {1: 0.93, 5: 0.65}),
    "20 ms compute, 20 ms sleep": Kind("HalfBusy", 0.02, {1: 0.95, 5: 0.80}),
}


class Run(NamedTuple):
    steps_per_second: float
    kills: int
    digest: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of undisturbed training")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 5.0], help="kills/s")
    parser.add_argument("--seed", type=int, default=7)
    asked = parser.parse_args()
    with Services() as services:
        data = services.root / "data"
        samples = STEPS_PER_EPOCH * BATCH_SIZE
        write_dataset(data, synthetic(samples=samples, shards=4, features=8, classes=4, seed=0))
        shutil.copy(Path(__file__).with_name("_programs.py"), services.root)
        for name, kind in KINDS.items():
            compare(services, name, kind, asked)
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: torchrun is left out")
    else:
        compare_torchrun(asked)


def compare(services: Services, name: str, kind: Kind, asked: argparse.Namespace) -> None:
    """Print the medians of one kind of step, measured in turn with and without kills."""
    draw = random.Random(asked.seed)  # noqa: S311  which rank is killed
    goodputs: dict[float, list[float]] = {rate: [] for rate in asked.rates}
    plain = []
    for _ in range(asked.rounds):
        alone = train(services, kind, 0.0, asked.seconds, draw)
        plain.append(alone.steps_per_second)
        for rate in asked.rates:
            run = train(services, kind, rate, asked.seconds, draw)
            if run.digest != alone.digest:
                raise RuntimeError(f"{name}: other bits after {run.kills} kills")
            goodputs[rate].append(run.steps_per_second / alone.steps_per_second)
    show(f"{name}: undisturbed, steps/s", plain, "-")
    for rate, found in goodputs.items():
        show(f"{name}: goodput at {rate:g} kills/s", found, f">= {kind.goals.get(rate, '-')}")


def compare_torchrun(asked: argparse.Namespace) -> None:
    """Print the medians of torchrun with the first kind of step, which starts all ranks again."""
    processor_seconds = 2 * STEP_SECONDS / RANKS  # two cores
    rates = [min(asked.rates) / 10, *asked.rates]
    goodputs: dict[float, list[float]] = {rate: [] for rate in rates}
    for _ in range(asked.rounds):
        alone = _gang.speed(RANKS, processor_seconds, 0.0, asked.seconds)
        for rate in rates:
            speed = _gang.speed(RANKS, processor_seconds, rate, max(asked.seconds, 3 / rate))
            goodputs[rate].append(speed / alone)
    for rate, found in goodputs.items():
        show(f"torchrun: goodput at {rate:g} kills/s", found, "-")


def train(services: Services, kind: Kind, rate: float, seconds: float, draw: random.Random) -> Run:
    """Train one job to its end; from `WARM_UP_STEPS` on kill `rate` ranks per second."""
    job = services.post(
        "/jobs",
        {
            "mode": "synchronous",
            "program": f"{services.root}/_programs.py:{kind.program}",
            "world_size": RANKS,
            "max_workers": RANKS,
            "batch_size": BATCH_SIZE,
            "virtual_shards": 8,
            "epochs": round(seconds / STEP_SECONDS / STEPS_PER_EPOCH),
            "sleep_sec": kind.sleep_seconds,
        },
    )
    path = f"/jobs/{job['job_id']}"
    while services.get(f"{path}/summary")["step"] < WARM_UP_STEPS:
        time.sleep(0.05)
    began, kills = datetime.now(UTC), 0
    next_kill = time.monotonic()
    deadline = next_kill + LIMIT_SECONDS
    while (summary := services.get(f"{path}/summary"))["status"] not in ("COMPLETED", "FAILED"):
        kills += bool(rate) and kill_one(living(summary["workers"]), draw)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path} has not ended after {LIMIT_SECONDS:g} s: {summary}")
        next_kill += 1 / rate if rate else 0.2
        time.sleep(max(0.0, next_kill - time.monotonic()))
    audit = services.get(f"{path}/audit")
    if not audit["exactly_once"]:
        raise RuntimeError(f"{summary['status']}, not exactly once: {summary['message']}")
    saved = [(at(it["saved_at"]), it["step"]) for it in audit["checkpoints"]]
    first = max((it for it in saved if it[0] <= began), default=saved[0])
    duration = (saved[-1][0] - first[0]).total_seconds()
    speed = (saved[-1][1] - first[1]) / duration
    return Run(speed, kills, audit["checkpoints"][-1]["digest"])


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def living(workers: Sequence[dict]) -> list[int]:
    return [it["pid"] for it in workers if it["pid"] is not None and it["process"] == "live"]


def kill_one(pids: Sequence[int], draw: random.Random) -> bool:
    """Kill one of these processes; return False if there is none."""
    if not pids:
        return False
    with suppress(ProcessLookupError):
        os.kill(draw.choice(pids), signal.SIGKILL)
        return True
    return False


def show(what: str, values: Sequence[float], goal: str) -> None:
    spread = f"({min(values):.2f} .. {max(values):.2f})"
    print(f"{what:<55} {statistics.median(values):>8.2f}   {goal:8} {spread}", flush=True)


if __name__ == "__main__":
    main()
