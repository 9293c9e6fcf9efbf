"""Replies are lost while the API is killed again and again: one key makes one job.

``python -m stress.lost_replies --keys 1000 --duplicates 8 --seed 0`` sends every request eight
times at once and retries each until it is answered. Then every key is sent once more with a
different request, which must be refused.
"""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import httpx

from stress.load.client import Answer, Connection, port_of
from stress.restarter import Restarter, await_api
from stress.runner import Report, chance, main
from tests.support.installation import Installation

KEYS_AT_ONCE = 4
RETRY_SECONDS = 0.05
PATIENCE_SECONDS = 120.0
"""For one request, across all restarts of the API."""
LIFE_SECONDS = (0.05, 0.6)
"""Life of an API after its first response."""


class Clients:
    """Sends requests under keys until each has an answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self.without_reply = 0
        """Requests that the API was killed before answering."""
        self.replayed = 0
        """How many of those had been committed."""

    def submit(self, key: str) -> str:
        """Return the id of the job of `key`; raises `TimeoutError` without an answer."""
        lost = 0
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{key} was not answered within {PATIENCE_SECONDS:.0f} seconds")
            try:
                answer = ask(self._port, key)
            except ConnectionRefusedError:
                time.sleep(RETRY_SECONDS)
            except OSError:
                lost += 1
            else:
                break
        assert answer.status == httpx.codes.CREATED, f"{answer.status}: {answer.body.decode()}"
        with self._lock:
            self.without_reply += lost
            self.replayed += lost > 0 and "idempotency-replayed" in answer.headers
        return str(answer.json()["job_id"])


def ask(port: int, key: str, world_size: int = 1) -> Answer:
    """Submit the job of `key`; another number of ranks makes it a different request."""
    body = {"command": ["true"], "name": key, "world_size": world_size}
    with Connection(port) as connection:
        return connection.post("/jobs", body, idempotency_key=key)


def run(
    directory: Path, *, keys: int = 200, duplicates: int = 3, kills: int = 1000, seed: int = 0
) -> Report:
    """Send requests to a new API, which is killed at most `kills` times.

    There is no coordinator, so the jobs stay queued.
    """
    installation = Installation(directory, DATASET_DIR=str(directory))
    installation.start_api()
    draw, killed = chance(seed), 0
    names = [f"key-{number}" for number in range(keys) for _ in range(duplicates)]
    restarter = Restarter(installation.api)
    restarter.start()
    try:
        with ThreadPoolExecutor(KEYS_AT_ONCE * duplicates) as threads:
            clients = Clients(port_of(installation.url))
            answers = [threads.submit(clients.submit, name) for name in names]
            try:
                while killed < kills and not all(answer.done() for answer in answers):
                    killed += _kill_once_it_serves(installation, draw)
                wait(answers, return_when=FIRST_EXCEPTION)
            finally:  # after a failure, do not begin the remaining requests
                threads.shutdown(wait=False, cancel_futures=True)
        await_api(installation)
        found = list(zip(names, (answer.result() for answer in answers), strict=True))
        faults = list(_wrong(installation, found))
    finally:
        restarter.end()
        installation.close()
    if not (killed and clients.without_reply):
        faults.append("no reply was lost: this has shown nothing")
    figures = (
        f"{keys} keys, {duplicates} times each, {killed} kills: {clients.without_reply} requests "
        f"without a reply, {clients.replayed} of them carried out"
    )
    return Report([figures], faults)


def _kill_once_it_serves(installation: Installation, draw: random.Random) -> int:
    await_api(installation)
    time.sleep(draw.uniform(*LIFE_SECONDS))
    process = installation.api.process
    if process is None:
        return 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    return 1


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


if __name__ == "__main__":
    main(run)
