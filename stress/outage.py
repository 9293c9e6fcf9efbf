"""The database fails while jobs train; only clients of the API may notice.

``python -m stress.outage --seconds 30 --rounds 2`` runs every kind of outage of SQLite and
PostgreSQL and prints what users would have seen. In each round a rank is killed during the outage,
in every second one the coordinator too.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from muster.checkpoints.manifest import LATEST, CheckpointName
from muster.contracts.settings.paths import checkpoints_of_job
from stress.callers import Callers
from stress.runner import Report, main, say
from tests.support.installation import (
    Installation,
    Service,
    await_value,
    end_of,
    has_saved,
    is_over,
    locked,
    pids,
    write_small_dataset,
)
from tests.support.postgres_server import fragile_postgres, ways
from tests.support.undisturbed import UndisturbedRuns, bits

STEP_SECONDS = 0.05
STEPS_PER_EPOCH = 16
"""Of two ranks that share 512 samples, 16 per step."""

ONCE = {"rank_started", "rank_live", "rank_exited", "job_completed"}
"""Kinds of events that an attempt, or a job, can have only once."""

REST_SECONDS = 6.0
"""Training time before and after an outage."""


def endure(
    installation: Installation,
    way: str,
    outage: Callable[[], AbstractContextManager[None]],
    seconds: float,
    undisturbed: UndisturbedRuns,
    dying: Collection[str] = (),
) -> Report:
    """Train through an outage of `seconds`; return what users would have seen.

    A second coordinator stands by. It must take over if the first one is in `dying`, and only
    then.
    """
    second = _standby(installation)
    try:
        report = _endure(installation, outage, seconds, undisturbed, dying)
        report.faults += _wrong_succession(installation, second, dying)
    finally:
        if second.process is not None and installation.coordinator is not second:
            second.end(signal.SIGTERM)
    way = " and ".join([way, *dying])
    return Report([f"{way}: {line}" for line in report.lines], report.faults)


def _endure(
    installation: Installation,
    outage: Callable[[], AbstractContextManager[None]],
    seconds: float,
    undisturbed: UndisturbedRuns,
    dying: Collection[str],
) -> Report:
    epochs = round((seconds + REST_SECONDS) / (STEPS_PER_EPOCH * STEP_SECONDS))
    alone = {"world_size": 2, "epochs": epochs, "sleep_sec": STEP_SECONDS}
    together = {**alone, "mode": "synchronous", "virtual_shards": 16, "batch_size": 32}
    calm, pooled = installation.submit(**alone), installation.submit(**together)
    installation.wait_until(pooled, lambda seen: seen["checkpoints_saved"])
    struck = installation.submit(**alone)
    victim = pids(installation.wait_until(struck, has_saved))[1]
    saved = _saves(installation, calm, pooled)
    with Callers(installation.url, calm) as callers:
        with outage():
            time.sleep(seconds / 2)
            os.kill(victim, signal.SIGKILL)
            if "coordinator" in dying:
                installation.coordinator.end(signal.SIGKILL)
            time.sleep(seconds / 2)
            meanwhile = _saves(installation, calm, pooled) - saved
        back = time.monotonic()
        await_value(lambda: installation.request("GET", f"/jobs/{struck}").is_success, str)
        answers_after = time.monotonic() - back
        installation.wait_until(struck, lambda now: now["workers"][1]["pid"] not in {None, victim})
        replaced_after = time.monotonic() - back
    callers.retry()
    faults = [*callers.wrong] if meanwhile else [*callers.wrong, "nothing was saved meanwhile"]
    for job_id, fields, restarts in ((calm, alone, 0), (struck, alone, 1), (pooled, together, 0)):
        faults += _faults(installation, job_id, restarts)
        if bits(installation, job_id) != undisturbed(**fields):
            faults.append(f"{job_id} has other bits")
    jobs = Counter(callers.acknowledged.values())
    faults += [f"{job_id} has {count} keys" for job_id, count in jobs.items() if count > 1]
    for job_id in jobs:
        installation.note(installation.job(job_id))
        installation.wait_until(job_id, is_over)
        faults += _doubled(installation, job_id)
    statuses = ", ".join(f"{count} x {code}" for code, count in sorted(callers.statuses.items()))
    line = (
        f"{meanwhile} steps saved meanwhile; answers {statuses}, slowest "
        f"{callers.slowest_seconds:.1f} s; after its return: answers in {answers_after:.2f} s, the "
        f"killed rank is replaced in {replaced_after:.2f} s; {len(callers.acknowledged)} keys"
    )
    return Report([line], faults)


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
        (event["kind"], event["rank"], event["attempt"])
        for event in events
        if event["kind"] in ONCE
    )
    yield from (f"{job_id}: {what} {count} times" for what, count in found.items() if count > 1)
    times = [event["at"] for event in events]
    if times != sorted(times):
        yield f"{job_id}: events are out of order"
    if events[-1]["kind"] != "job_completed":
        yield f"{job_id} ends with {events[-1]['kind']}"


def run(directory: Path, *, seconds: float = 30.0, rounds: int = 2) -> Report:
    """Run every kind of outage so often."""
    whole = Report()
    with ExitStack() as stack:
        environment = {"DATASET_DIR": str(write_small_dataset(directory / "shards"))}
        (directory / "sqlite").mkdir()
        (directory / "postgres").mkdir()
        small = stack.enter_context(Installation(directory / "sqlite", **environment))
        server = stack.enter_context(fragile_postgres())
        environment["MUSTER_DATABASE_URL"] = server.url
        large = stack.enter_context(Installation(directory / "postgres", **environment))
        cases = [(f"PostgreSQL {name}", large, way) for name, way in ways(server).items()]
        cases.append(("SQLite locked", small, lambda: locked(small)))
        stranger = "SQLite locked by another writer"
        cases.append((stranger, small, lambda: locked(small, "BEGIN IMMEDIATE")))
        undisturbed = UndisturbedRuns(small)
        for number in range(rounds):
            dying = ("coordinator",) if number % 2 else ()
            for name, installation, outage in cases:
                report = endure(installation, name, outage, seconds, undisturbed, dying)
                say(str(report))
                whole.faults += report.faults
    return whole


if __name__ == "__main__":
    main(run)
