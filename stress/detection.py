"""How soon exits are detected and frozen ranks replaced, and that there are no false alarms.

``python -m stress.detection --kills 200 --freezes 50 --minutes 20`` runs in a new installation and
prints a table: ranks that are killed, ranks that are stopped, and undisturbed jobs on a machine
with busy processors. A machine that is busy with other things may miss the goals.
"""

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from cli.output import table
from stress.runner import Report, chance, main, say
from tests.support.installation import Installation, is_over, pids, write_small_dataset

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "worst": 1.0}
HEADER = ("what", "times", *SHARES, "goal")

RANKS_PER_JOB = 25
KILLS_PER_RANK = 4
"""With more, the backoff would grow too long."""

TIMEOUT_SECONDS = 2.0
"""After which a frozen rank is replaced."""

KILL_PAUSE_SECONDS = (0.1, 0.4)
FREEZE_PAUSE_SECONDS = (0.5, 1.0)
"""Between two faults. A successor is a Python that starts, and must not slow down the next."""

GOALS = {"kill -9 -> seen": ("p99", 0.050), "SIGSTOP -> successor runs": ("worst", 3.0)}

SPINNERS = 2 * len(os.sched_getaffinity(0))
"""They keep every core busy twice over."""

GENEROUS = {
    "max_kills": 10_000,
    "max_restarts": 10_000,
    "max_hangs": 10_000,
    "max_fruitless": 10_000,
}
IDLE = ("sleep", "86400")
STEPPING = """
import time, muster
run = muster.join()
while True:
    run.step()
    time.sleep(0.1)
"""

ENDLESS = {"epochs": 1_000_000, "sleep_sec": 0.05, "checkpoint_every": 50}
"""On a slow disk fewer steps per save would earn a warning, rightly, which is no false alarm."""

WATCHED = (
    {"mode": "synchronous", "world_size": 2, **ENDLESS},
    {"mode": "independent", "world_size": 2, **ENDLESS},
    {"mode": "independent", "world_size": 2, "command": [sys.executable, "-c", STEPPING]},
)
"""Jobs of every kind, with the usual timeout."""

ALARMS = frozenset({"rank_killed", "rank_exited", "agent_lost", "agent_killed", "warned"})
LOOK_SECONDS = 5.0

Process = tuple[str, int, int]
"""Job, rank and attempt."""


def run(
    directory: Path, *, kills: int = 200, freezes: int = 50, minutes: float = 20.0, seed: int = 0
) -> Report:
    """Measure in a new installation."""
    report, draw = Report(), chance(seed)
    data = write_small_dataset(directory / "shards")
    with Installation(directory, DATASET_DIR=str(data), MUSTER_SLOTS="1000") as installation:
        say(f"{kills} ranks are killed")
        took = {"kill -9 -> seen": killed(installation, kills, draw)}
        say(f"{freezes} ranks are stopped")
        took["SIGSTOP -> successor runs"] = frozen(installation, freezes, draw)
        rows = []
        for what, seconds in took.items():
            column, goal = GOALS[what]
            is_met = not seconds or quantile(seconds, SHARES[column]) <= goal
            shown = [
                f"{quantile(seconds, it):.3f} s" if seconds else None for it in SHARES.values()
            ]
            rows.append((what, len(seconds), *shown, f"{column} <= {goal:.3f} s"))
            if not is_met:
                report.faults.append(f"{what}: the goal is missed")
        report.lines += table(HEADER, rows)
        say(f"undisturbed jobs for {minutes:g} minutes")
        alarms, suspicions = watch(installation, minutes)
    report.lines.append(
        f"{len(alarms)} false alarms in {minutes:g} minutes beside {SPINNERS} busy processes; "
        f"{suspicions} late heartbeats, which change nothing"
    )
    report.faults += [f"false alarm: {alarm}" for alarm in alarms]
    return report


def quantile(seconds: Sequence[float], share: float) -> float:
    """Return the smallest of them that is not exceeded by `share` of all."""
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1]


def killed(installation: Installation, kills: int, draw: random.Random) -> list[float]:
    """Kill one rank after the other; return how soon each exit was detected."""
    jobs = start_ranks(installation, math.ceil(kills / KILLS_PER_RANK), command=IDLE)
    struck: dict[Process, float] = {}
    for number in range(kills):
        job_id, rank = jobs[number % len(jobs)]
        pid, attempt = live_rank(installation, job_id, rank)
        struck[job_id, rank, attempt] = time.time()
        os.kill(pid, signal.SIGKILL)
        time.sleep(draw.uniform(*KILL_PAUSE_SECONDS))
    return delays(installation, "rank_exited", struck)


def frozen(installation: Installation, freezes: int, draw: random.Random) -> list[float]:
    """Stop every rank once; return how long it took until its successor ran."""
    command = [sys.executable, "-c", STEPPING]
    jobs = start_ranks(installation, freezes, command=command, heartbeat_timeout=TIMEOUT_SECONDS)
    draw.shuffle(jobs)
    struck: dict[Process, float] = {}
    for job_id, rank in jobs:
        installation.wait_until(job_id, lambda seen, rank=rank: seen["workers"][rank]["step"])
        pid, attempt = live_rank(installation, job_id, rank)
        struck[job_id, rank, attempt + 1] = time.time()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(*FREEZE_PAUSE_SECONDS))
    return delays(installation, "rank_started", struck)


def watch(installation: Installation, minutes: float) -> tuple[list[str], int]:
    """Train jobs of every kind on a busy machine; return alarms, and count late heartbeats."""
    jobs = [installation.submit(**fields, **GENEROUS) for fields in WATCHED]
    for job_id in jobs:
        installation.wait_until(job_id, lambda seen: all(w["step"] for w in seen["workers"]))
    with busy_processors():
        deadline = time.monotonic() + 60 * minutes
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(LOOK_SECONDS, left))
            assert not any(is_over(installation.see(job_id)) for job_id in jobs)
        events = [event for job_id in jobs for event in installation.events(job_id)]
    stop(installation, jobs)
    alarms = [event["message"] for event in events if event["kind"] in ALARMS]
    return alarms, sum(event["kind"] == "rank_suspected" for event in events)


@contextmanager
def busy_processors() -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(SPINNERS):
            spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(stack.enter_context(spinner).kill)
        yield


def start_ranks(installation: Installation, ranks: int, **fields: object) -> list[tuple[str, int]]:
    """Start `ranks` ranks in a few jobs; return job and rank of each."""
    jobs: list[tuple[str, int]] = []
    while len(jobs) < ranks:
        size = min(RANKS_PER_JOB, ranks - len(jobs))
        job_id = installation.submit(world_size=size, **fields, **GENEROUS)
        jobs += [(job_id, rank) for rank in range(size)]
    for job_id, rank in jobs:
        live_rank(installation, job_id, rank)
    return jobs


def live_rank(installation: Installation, job_id: str, rank: int) -> tuple[int, int]:
    """Return pid and attempt of a rank, once it is alive."""
    seen = installation.wait_until(
        job_id, lambda seen: seen["workers"][rank]["process"] == "live" and pids(seen)[rank]
    )
    return pids(seen)[rank], int(seen["workers"][rank]["attempt"])


def delays(installation: Installation, kind: str, struck: dict[Process, float]) -> list[float]:
    """Return when each of the processes was reported, after it was struck; stop their jobs."""
    jobs = {job_id for job_id, _, _ in struck}
    found: dict[Process, float] = {}

    def has_all(job_id: str) -> Callable[[object], bool]:
        def look(_seen: object) -> bool:
            for event in installation.events(job_id):
                if event["kind"] == kind:
                    at = datetime.fromisoformat(event["at"]).timestamp()
                    found[job_id, event["rank"], event["attempt"]] = at
            return all(process in found for process in struck if process[0] == job_id)

        return look

    for job_id in jobs:
        installation.wait_until(job_id, has_all(job_id))
    stop(installation, jobs)
    return [found[process] - at for process, at in struck.items()]


def stop(installation: Installation, jobs: Iterable[str]) -> None:
    for job_id in jobs:
        installation.stop(job_id, 1.0)
        installation.wait_until(job_id, is_over)


if __name__ == "__main__":
    main(run)
