"""How soon exits are detected and frozen ranks replaced, and that there are no false alarms.

``python -m stress.vigil --kills 200 --freezes 50 --minutes 20`` runs in a new installation and
prints a table: ranks that are killed, ranks that are stopped, and undisturbed jobs on a machine
with busy processors. The exit code is 1 if a goal is missed.
"""

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cli.output import table
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from tests.support.installation import Installation, is_over, pids

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "worst": 1.0}
HEADER = ("what", "times", *SHARES, "goal")

RANKS_PER_JOB = 25
KILLS_PER_RANK = 4
"""With more, the backoff would grow too long."""

TIMEOUT_SECONDS = 2.0
"""After which a frozen rank is replaced."""

SEEN_SECONDS = 0.050
"""Goal of the 99th percentile."""

KILL_PAUSE_SECONDS = (0.1, 0.4)
FREEZE_PAUSE_SECONDS = (0.5, 1.0)
"""Between two faults. A successor is a Python that starts, and must not slow down the next."""

SPINNERS_PER_CORE = 2
BUSY = "while True: pass"

GENEROUS = {"max_restarts": 10_000, "max_hangs": 10_000, "max_fruitless": 10_000}
IDLE = ("sleep", "86400")
STEPPING = """
import time, muster
run = muster.join()
while True:
    run.step()
    time.sleep(0.1)
"""

ENDLESS = {"epochs": 1_000_000, "sleep_sec": 0.05}
WATCHED = (
    {"mode": "synchronous", "world_size": 2, **ENDLESS},
    {"mode": "independent", "world_size": 2, **ENDLESS},
    {"mode": "independent", "world_size": 2, "command": [sys.executable, "-c", STEPPING]},
)
"""Jobs of every kind, with the usual timeout."""

ALARMS = frozenset({"rank_killed", "rank_exited", "agent_lost", "agent_killed", "warned"})
LOOK_SECONDS = 5.0

Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one kind of fault."""

    what: str
    seconds: Sequence[float]
    goal_seconds: float
    goal_share: float = 1.0
    """Of all, that do not take longer than the goal."""

    @property
    def is_met(self) -> bool:
        """Of nothing that was measured, nothing was missed."""
        return not self.seconds or quantile(self.seconds, self.goal_share) <= self.goal_seconds

    def cells(self) -> tuple[str | int | None, ...]:
        quantiles = (f"{quantile(self.seconds, share):.3f} s" for share in SHARES.values())
        shown = quantiles if self.seconds else [None for _ in SHARES]
        return (self.what, len(self.seconds), *shown, self._goal())

    def _goal(self) -> str:
        column = next(name for name, share in SHARES.items() if share == self.goal_share)
        return f"{column} <= {self.goal_seconds:.3f} s" + ("" if self.is_met else ": MISSED")


@dataclass(kw_only=True)
class Report:
    rows: list[Row] = field(default_factory=list)
    watched_minutes: float = 0.0
    alarms: list[str] = field(default_factory=list)
    """Reports about undisturbed ranks and agents."""
    suspicions: int = 0

    @property
    def is_good(self) -> bool:
        """Whether every goal is met; a machine that is busy with other things may miss those."""
        return not self.alarms and all(row.is_met for row in self.rows)

    def lines(self) -> Iterator[str]:
        yield from table(HEADER, [row.cells() for row in self.rows])
        yield ""
        yield (
            f"false alarms in {self.watched_minutes:g} minutes with "
            f"{spinners_count()} busy processes: {len(self.alarms)}   (goal: 0)"
        )
        yield from (f"    {alarm}" for alarm in self.alarms)
        yield f"late heartbeats meanwhile, which change nothing: {self.suspicions}"


def quantile(seconds: Sequence[float], share: float) -> float:
    """Return the smallest of them that is not exceeded by `share` of all."""
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1]


def keep_vigil(
    directory: Path, *, kills: int, freezes: int, minutes: float, seed: int, say: Say
) -> Report:
    """Run in a new installation."""
    chance = random.Random(seed)  # noqa: S311  repeatable on purpose, no secret
    data = directory / "shards"
    write_dataset(data, synthetic(samples=512, shards=8, features=8))
    report = Report()
    with Installation(directory, DATASET_DIR=str(data), MUSTER_SLOTS="1000") as installation:
        say(f"{kills} ranks are killed")
        report.rows.append(killed(installation, kills, chance))
        say(f"{freezes} ranks are stopped")
        report.rows.append(frozen(installation, freezes, chance))
        say(f"undisturbed jobs for {minutes:g} minutes")
        watch(installation, minutes, report)
    return report


# Ranks that are killed


def killed(installation: Installation, kills: int, chance: random.Random) -> Row:
    """Kill one rank after the other; return how soon each exit was detected."""
    ranks = math.ceil(kills / KILLS_PER_RANK)
    jobs = crowd(installation, ranks, command=IDLE)
    struck: dict[Process, float] = {}
    for number in range(kills):
        job_id, rank = jobs[number % ranks]
        pid, incarnation = present(installation, job_id, rank)
        struck[job_id, rank, incarnation] = time.time()
        os.kill(pid, signal.SIGKILL)
        time.sleep(chance.uniform(*KILL_PAUSE_SECONDS))
    seen = reported(installation, {job_id for job_id, _ in jobs}, "rank_exited", struck)
    end(installation, jobs)
    seconds = [seen[process] - at for process, at in struck.items()]
    return Row(
        what="kill -9 -> seen", seconds=seconds, goal_seconds=SEEN_SECONDS, goal_share=SHARES["p99"]
    )


# Ranks that are stopped


def frozen(installation: Installation, freezes: int, chance: random.Random) -> Row:
    """Stop every rank once; return how long it took until its successor ran."""
    jobs = crowd(
        installation,
        freezes,
        command=[sys.executable, "-c", STEPPING],
        heartbeat_timeout=TIMEOUT_SECONDS,
    )
    chance.shuffle(jobs)
    struck: dict[Process, float] = {}
    for job_id, rank in jobs:
        installation.wait_until(job_id, lambda seen, rank=rank: seen["workers"][rank]["step"])
        pid, incarnation = present(installation, job_id, rank)
        struck[job_id, rank, incarnation + 1] = time.time()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(chance.uniform(*FREEZE_PAUSE_SECONDS))
    seen = reported(installation, {job_id for job_id, _ in jobs}, "rank_started", struck)
    end(installation, jobs)
    seconds = [seen[process] - at for process, at in struck.items()]
    return Row(what="SIGSTOP -> successor runs", seconds=seconds, goal_seconds=TIMEOUT_SECONDS + 1)


# Undisturbed jobs


def watch(installation: Installation, minutes: float, report: Report) -> None:
    """Train jobs of every kind on a busy machine, and record all reports about them."""
    jobs = [installation.submit(**fields, **GENEROUS) for fields in WATCHED]
    for job_id in jobs:
        installation.wait_until(job_id, lambda seen: all(w["step"] for w in seen["workers"]))
    with busy_processors():
        deadline = time.monotonic() + 60 * minutes
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(LOOK_SECONDS, left))
            assert not any(is_over(installation.see(job_id)) for job_id in jobs)
        report.watched_minutes = minutes
        for job_id in jobs:
            events = installation.events(job_id)
            report.alarms += [event["message"] for event in events if event["kind"] in ALARMS]
            report.suspicions += sum(event["kind"] == "rank_suspected" for event in events)
    end(installation, [(job_id, 0) for job_id in jobs])


@contextmanager
def busy_processors() -> Iterator[None]:
    """Keep every core busy twice over."""
    with ExitStack() as stack:
        for _ in range(spinners_count()):
            spinner = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(spinner.kill)
        yield


def spinners_count() -> int:
    return SPINNERS_PER_CORE * len(os.sched_getaffinity(0))


# Helpers


Process = tuple[str, int, int]
"""Job, rank and incarnation."""


def crowd(installation: Installation, ranks: int, **fields: object) -> list[tuple[str, int]]:
    """Start `ranks` ranks in a few jobs; return job and rank of each."""
    jobs: list[tuple[str, int]] = []
    while len(jobs) < ranks:
        size = min(RANKS_PER_JOB, ranks - len(jobs))
        job_id = installation.submit(world_size=size, **fields, **GENEROUS)
        jobs += [(job_id, rank) for rank in range(size)]
    for job_id, rank in jobs:
        present(installation, job_id, rank)
    return jobs


def present(installation: Installation, job_id: str, rank: int) -> tuple[int, int]:
    """Return pid and incarnation of a rank, once it is alive."""
    seen = installation.wait_until(
        job_id,
        lambda seen: seen["workers"][rank]["state"] == "live" and pids(seen)[rank],
    )
    _, _, incarnation = seen["workers"][rank]["worker_id"].partition(".")
    return pids(seen)[rank], int(incarnation)


def reported(
    installation: Installation, jobs: set[str], kind: str, wanted: dict[Process, float]
) -> dict[Process, float]:
    """Return when each of the processes was reported (Unix time)."""
    last: dict[str, set[tuple[int, int]]] = {job_id: set() for job_id in jobs}
    for job_id, rank, incarnation in wanted:
        last[job_id].add((rank, incarnation))
    found: dict[Process, float] = {}
    for job_id, processes in last.items():
        installation.wait_until(
            job_id,
            lambda _, job_id=job_id, processes=processes: (
                processes <= moments(installation, job_id, kind).keys()
            ),
        )
        told = moments(installation, job_id, kind)
        found |= {(job_id, *process): told[process] for process in processes}
    return found


def moments(installation: Installation, job_id: str, kind: str) -> dict[tuple[int, int], float]:
    return {
        (event["rank"], event["incarnation"]): datetime.fromisoformat(event["at"]).timestamp()
        for event in installation.events(job_id)
        if event["kind"] == kind
    }


def end(installation: Installation, jobs: Sequence[tuple[str, int]]) -> None:
    for job_id in {job_id for job_id, _ in jobs}:
        installation.stop(job_id, 1.0)
        installation.wait_until(job_id, is_over)


def main() -> int:
    """Return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, what in (
        ("kills", 200, "ranks that are killed"),
        ("freezes", 50, "ranks that are stopped"),
        ("seed", 0, "decides whom"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="of undisturbed jobs (%(default)g)"
    )
    asked = vars(parser.parse_args())
    # On SIGTERM, end all processes that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as directory:
        report = keep_vigil(Path(directory), **asked, say=_say)
    for line in report.lines():
        _say(line)
    return 0 if report.is_good else 1


def _say(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main())
