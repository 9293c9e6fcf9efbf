"""The database fails while jobs train; only clients of the API may notice.

``python -m stress.outage --seconds 30 --rounds 2`` runs every kind of outage of SQLite and
PostgreSQL and prints what users would have seen. In each round a rank is killed during the outage,
in every second one the coordinator too.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoints.manifest import LATEST, CheckpointName
from muster.contracts.paths import checkpoints_of_job
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from stress.callers import Callers
from tests.support.database_away import locked, ways
from tests.support.fragile_postgres import fragile_postgres
from tests.support.installation import (
    Installation,
    Service,
    await_value,
    end_of,
    has_saved,
    is_over,
    pids,
)
from tests.support.undisturbed import UndisturbedRuns, bits

STEP_SECONDS = 0.05
STEPS_PER_EPOCH = 16
"""Of two ranks that share 512 samples, 16 per step."""

ONCE = {"rank_started", "rank_live", "rank_exited", "job_completed"}
"""Kinds of events that an attempt, or a job, can have only once."""

REST_SECONDS = 6.0
"""Training time before and after an outage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What users would have seen of one outage."""

    way: str
    steps: int
    """Steps that became durable during the outage."""
    statuses: Mapping[int, int]
    slowest_seconds: float
    answers_after_seconds: float
    replaced_after_seconds: float
    keys: int
    faults: list[str]

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} x {code}" for code, count in sorted(self.statuses.items()))
        return (
            f"{self.way}: {self.steps} steps saved meanwhile; answers {statuses}, slowest "
            f"{self.slowest_seconds:.1f} s; after its return: answers in "
            f"{self.answers_after_seconds:.2f} s, the killed rank is replaced in "
            f"{self.replaced_after_seconds:.2f} s; {self.keys} keys, one job each; "
            + ("; ".join(self.faults) or "no fault")
        )


def endure(
    installation: Installation,
    way: str,
    outage: Callable[[], AbstractContextManager[None]],
    seconds: float,
    undisturbed: UndisturbedRuns,
    dying: Collection[str] = (),
) -> Figures:
    """Train through an outage of `seconds`; return the figures with all faults.

    A second coordinator stands by. It must take over if the first one is in `dying`, and only
    then.
    """
    second = _standby(installation)
    try:
        return _endure(installation, way, outage, seconds, undisturbed, dying, second)
    finally:
        if second.process is not None and installation.coordinator is not second:
            second.end(signal.SIGTERM)


def _endure(
    installation: Installation,
    way: str,
    outage: Callable[[], AbstractContextManager[None]],
    seconds: float,
    undisturbed: UndisturbedRuns,
    dying: Collection[str],
    second: Service,
) -> Figures:
    epochs = round((seconds + REST_SECONDS) / (STEPS_PER_EPOCH * STEP_SECONDS))
    fields = {"world_size": 2, "epochs": epochs, "sleep_sec": STEP_SECONDS}
    calm = installation.submit(**fields)
    pooled = {**fields, "mode": "synchronous", "virtual_shards": 16, "batch_size": 32}
    together = installation.submit(**pooled)
    installation.wait_until(together, lambda seen: seen["checkpoints_saved"])
    struck = installation.submit(**fields)
    victim = pids(installation.wait_until(struck, has_saved))[1]
    saved = _saves(installation, calm, together)
    with Callers(installation.url, calm) as callers:
        with outage():
            time.sleep(seconds / 2)
            os.kill(victim, signal.SIGKILL)
            if "coordinator" in dying:
                installation.coordinator.end(signal.SIGKILL)
            time.sleep(seconds / 2)
            meanwhile = _saves(installation, calm, together) - saved
        back = time.monotonic()
        _await_answer(installation, struck)
        answers_after = time.monotonic() - back
        installation.wait_until(struck, lambda now: now["workers"][1]["pid"] not in {None, victim})
        replaced_after = time.monotonic() - back
    callers.retry()
    faults = [*callers.wrong]
    for job_id, restarts in ((calm, 0), (struck, 1), (together, 0)):
        faults += _faults(installation, job_id, restarts)
        if bits(installation, job_id) != undisturbed.bits(
            **(pooled if job_id == together else fields)
        ):
            faults.append(f"{job_id} has other bits")
    faults += _wrong_succession(installation, second, dying)
    jobs = Counter(callers.acknowledged.values())
    faults += [f"{job_id} has {count} keys" for job_id, count in jobs.items() if count > 1]
    for job_id in jobs:
        installation.note(installation.job(job_id))
        installation.wait_until(job_id, is_over)
        faults += _doubled(installation, job_id)
    return Figures(
        way=way,
        steps=meanwhile,
        statuses=callers.statuses,
        slowest_seconds=callers.slowest_seconds,
        answers_after_seconds=answers_after,
        replaced_after_seconds=replaced_after,
        keys=len(callers.acknowledged),
        faults=faults + ([] if meanwhile else ["nothing was saved meanwhile"]),
    )


def _standby(installation: Installation) -> Service:
    second = Service("coordinator", installation.root, installation.environment)
    second.log = installation.root / f"second-{time.monotonic_ns()}.log"
    second.start()
    await_value(
        lambda: "waiting: process" in second.log.read_text(),
        lambda: end_of(second.log),
    )
    return second


def _wrong_succession(
    installation: Installation, second: Service, dying: Collection[str]
) -> Iterator[str]:
    """Yield faults of the takeover; afterwards exactly one coordinator runs."""
    coordinates = "coordinates, with" in second.log.read_text()
    if second.process is None or second.process.poll() is not None:
        yield f"the second coordinator ended: {end_of(second.log)}"
    elif "coordinator" in dying:
        installation.coordinator = second
        if not coordinates:
            yield "the second coordinator did not take over"
    else:
        if coordinates:
            yield "the second coordinator took over although the first was alive"
        process = installation.coordinator.process
        if process is None or process.poll() is not None:
            yield "the coordinator ended"


def _saves(installation: Installation, *jobs: str) -> int:
    """Return the sum of the steps that are durable, over all ranks of these jobs."""
    roots = [checkpoints_of_job(installation.checkpoint_dir, job_id) for job_id in jobs]
    latest = [
        path
        for root in roots
        for where in (".", "worker_*")
        for path in root.glob(f"{where}/{LATEST}")
    ]
    names = [path.read_text().strip() for path in latest]
    return sum(name.step for name in map(CheckpointName.parse, names) if name is not None)


def _await_answer(installation: Installation, job_id: str) -> None:
    await_value(lambda: installation.request("GET", f"/jobs/{job_id}").is_success, str)


def _faults(installation: Installation, job_id: str, restarts: int) -> Iterator[str]:
    seen = installation.complete(job_id)
    if seen["restarts"] != restarts:
        yield f"{job_id} has {seen['restarts']} restarts"
    if installation.kinds(job_id).count("rank_exited") < restarts:
        yield f"{job_id} has no event about the rank's end"
    yield from _doubled(installation, job_id)


def _doubled(installation: Installation, job_id: str) -> Iterator[str]:
    """Yield duplicate events, and a missing end of the job."""
    events = installation.events(job_id)
    found = Counter(
        (event["kind"], event["rank"], event["incarnation"])
        for event in events
        if event["kind"] in ONCE
    )
    yield from (f"{job_id}: {what} {count} times" for what, count in found.items() if count > 1)
    times = [event["at"] for event in events]
    if times != sorted(times):
        yield f"{job_id}: events are out of order"
    if events[-1]["kind"] != "job_completed":
        yield f"{job_id} ends with {events[-1]['kind']}"


def main() -> int:
    """Run every kind of outage; return 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each outage (30)")
    parser.add_argument("--rounds", type=int, default=2, help="of all kinds (2)")
    asked = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        root = Path(directory)
        shards = root / "shards"
        write_dataset(shards, synthetic(samples=512, shards=8, features=8, classes=3))
        environment = {"DATASET_DIR": str(shards)}
        (root / "sqlite").mkdir()
        (root / "postgres").mkdir()
        small = stack.enter_context(Installation(root / "sqlite", **environment))
        server = stack.enter_context(fragile_postgres())
        large = stack.enter_context(
            Installation(root / "postgres", MUSTER_DATABASE_URL=server.url, **environment)
        )
        cases = [(f"PostgreSQL {name}", large, way) for name, way in ways(server).items()]
        cases.append(("SQLite locked", small, lambda: locked(small)))
        stranger = "SQLite locked by another writer"
        cases.append((stranger, small, lambda: locked(small, "BEGIN IMMEDIATE")))
        undisturbed = UndisturbedRuns(small)
        for number in range(asked.rounds):
            dying = ("coordinator",) if number % 2 else ()
            for name, installation, outage in cases:
                way = " and ".join([name, *dying])
                figures = endure(installation, way, outage, asked.seconds, undisturbed, dying)
                failed = failed or bool(figures.faults)
                print(figures, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
