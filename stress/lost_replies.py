"""Replies are lost while the API is killed again and again: one key makes one job.

``python -m stress.lost_replies --keys 1000 --duplicates 8 --seed 0`` sends every request eight
times at once and retries each until it is answered. Then every key is sent once more with a
different request, which must be refused.
"""

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from stress.chaos.restarter import Restarter
from stress.load.client import Answer, Connection, port_of, post
from tests.support.installation import Installation, await_value

KEYS_AT_ONCE = 4
RETRY_SECONDS = 0.05
PATIENCE_SECONDS = 120.0
"""For one request, across all restarts of the API."""
LIFE_SECONDS = (0.05, 0.6)
"""Life of an API after its first response."""


@dataclass
class Report:
    """Counts and faults of a run."""

    keys: int
    duplicates: int
    kills: int = 0
    without_reply: int = 0
    """Requests that the API was killed before answering."""
    replayed_after: int = 0
    """How many of those had been committed."""
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.keys} keys, {self.duplicates} times each, {self.kills} kills: "
            f"{self.without_reply} requests without a reply, {self.replayed_after} of them carried "
            "out; " + ("; ".join(self.faults) or "one job for each key, no key for another request")
        )


class Hammer:
    """Sends requests under keys until each has an answer."""

    def __init__(self, port: int, report: Report) -> None:
        self._port = port
        self._report = report
        self._lock = threading.Lock()

    def strike(self, key: str) -> str:
        """Return the id of the job of `key`; raises `TimeoutError` without an answer."""
        was_lost = False
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{key} was not answered within {PATIENCE_SECONDS:.0f} seconds")
            try:
                answer = ask(self._port, key)
            except ConnectionRefusedError:
                time.sleep(RETRY_SECONDS)
            except OSError:
                was_lost = True
                self._count(without_reply=1)
            else:
                break
        if answer.status != httpx.codes.CREATED:
            raise AssertionError(f"{answer.status}: {answer.body.decode()}")
        self._count(replayed_after=was_lost and "idempotency-replayed" in answer.headers)
        return str(answer.json()["job_id"])

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self._report, name, getattr(self._report, name) + count)


def ask(port: int, key: str, world_size: int = 1) -> Answer:
    """Submit the job of `key`; another number of ranks makes it a different request."""
    body = {"command": ["true"], "name": key, "world_size": world_size}
    with Connection(port) as connection:
        return connection.ask(post("/jobs", body, idempotency_key=key))


def run(root: Path, *, keys: int, duplicates: int, kills: int, seed: int) -> Report:
    """Send requests to a new API, which is killed at most `kills` times.

    There is no coordinator, so the jobs stay queued.
    """
    report = Report(keys, duplicates)
    installation = Installation(root, DATASET_DIR=str(root))
    installation.start_api()
    chance = random.Random(seed)  # noqa: S311  repeatable on purpose, no secret
    names = [f"key-{number}" for number in range(keys) for _ in range(duplicates)]
    restarter = Restarter(installation.api)
    restarter.start()
    try:
        with ThreadPoolExecutor(KEYS_AT_ONCE * duplicates) as clients:
            hammer = Hammer(port_of(installation.url), report)
            answers = [clients.submit(hammer.strike, name) for name in names]
            try:
                while report.kills < kills and not all(answer.done() for answer in answers):
                    report.kills += _kill_once_it_serves(installation, chance)
                wait(answers, return_when=FIRST_EXCEPTION)
            finally:  # after a failure, do not begin the remaining requests
                clients.shutdown(wait=False, cancel_futures=True)
        _await_service(installation)
        found = list(zip(names, (answer.result() for answer in answers), strict=True))
        report.faults += _wrong(installation, found)
    finally:
        restarter.end()
        installation.close()
    return report


def _kill_once_it_serves(installation: Installation, chance: random.Random) -> int:
    _await_service(installation)
    time.sleep(chance.uniform(*LIFE_SECONDS))
    process = installation.api.process
    if process is None:
        return 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    return 1


def _await_service(installation: Installation) -> None:
    def serves() -> bool:
        try:
            return installation.request("GET", "/jobs?limit=1").is_success
        except httpx.TransportError:
            return False

    await_value(serves, str)


def _wrong(installation: Installation, found: list[tuple[str, str]]) -> Iterator[str]:
    jobs = dict(found)
    for key, job_id in found:
        if jobs[key] != job_id:
            yield f"{key} was answered with {job_id} and with {jobs[key]}"
    for job_id in set(jobs.values()):
        if not installation.request("GET", f"/jobs/{job_id}").is_success:
            yield f"{job_id} was acknowledged and is lost"
    total = _jobs(installation)
    if total != len(jobs):
        yield f"{total} jobs for {len(jobs)} keys"
    shared = [job_id for job_id, count in Counter(jobs.values()).items() if count > 1]
    yield from (f"{job_id} has several keys" for job_id in shared)
    yield from _taken_for_another(installation, sorted(jobs))


def _taken_for_another(installation: Installation, keys: list[str]) -> Iterator[str]:
    before = _jobs(installation)
    for key in keys:
        answer = ask(port_of(installation.url), key, world_size=2)
        if answer.status != httpx.codes.UNPROCESSABLE_ENTITY:
            yield f"another request under {key} was answered with {answer.status}"
    if _jobs(installation) != before:
        yield "a refused request has left a job"


def _jobs(installation: Installation) -> int:
    return int(installation.request("GET", "/jobs?limit=1").headers["X-Total-Count"])


def main() -> int:
    """Run, print the report, and return 1 if a job is lost or duplicated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=200, help="requests to send (200)")
    parser.add_argument("--duplicates", type=int, default=3, help="of each, at once (3)")
    parser.add_argument("--kills", type=int, default=1000, help="of the API, at most (1000)")
    parser.add_argument("--seed", type=int, default=0, help="decides when it is killed (0)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = run(
            Path(directory),
            keys=asked.keys,
            duplicates=asked.duplicates,
            kills=asked.kills,
            seed=asked.seed,
        )
    print(report, flush=True)
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
