"""Many short jobs: ``python bench/jobs.py [jobs]``.

200 jobs of ``true`` with 8 slots: jobs a second, and processor time a job in all processes. 200 of
``sleep 0.2``, compared with a bare pool of eight. With a number (10000): so many jobs of ``true``,
and by how much the services' memory has grown since the first hundred.
"""

import http.client
import json
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from _services import Services, cpu_seconds, memory_megabytes

SLOTS = 8
JOBS = 200
JOBS_PER_LINE = 1000
SETTLED = 100
"""Jobs after which the services hold what they hold for good."""


def main() -> None:
    with Services(slots=SLOTS) as services:
        time.sleep(1)  # what the services prepare in the background
        if len(sys.argv) > 1:
            growth(services, int(sys.argv[1]))
            return
        run(services, "warm", SLOTS, "true")
        before = processor_seconds(services)
        seconds = run(services, "true", JOBS, "true")
        spent = processor_seconds(services) - before
        show("jobs of `true` a second", JOBS / seconds, ">= 30")
        show("processor time a job in all processes, ms", 1000 * spent / JOBS, "<= 45")
        seconds = run(services, "sleep", JOBS, "sleep", "0.2")
        bare = pool_seconds("sleep", "0.2")
        show(f"{JOBS} of `sleep 0.2` / a bare pool of {SLOTS}", seconds / bare, "<= 1.3")


def growth(services: Services, jobs: int) -> None:
    first = SETTLED / run(services, "first", SETTLED, "true")
    # Private memory: the shared pages of the services do not grow.
    before = memory_megabytes(services.pids(), "Private_")
    # As many at once as at first: a job that waits takes about 20 KB.
    for done in range(2 * SETTLED, jobs + 1, SETTLED):
        rate = SETTLED / run(services, f"after-{done}", SETTLED, "true")
        if done % JOBS_PER_LINE == 0 or done + SETTLED > jobs:
            show(f"jobs a second, the last {SETTLED} of {done}", rate, f"{first:.1f}")
    grown = memory_megabytes(services.pids(), "Private_") - before
    show("memory growth of the services, MB", grown, "<= 10")


def run(services: Services, name: str, jobs: int, *command: str) -> float:
    """Return the seconds from the first submission to the end of the last agent."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", services.port)
    for number in range(jobs):
        body = {"job_id": f"{name}-{number}", "world_size": 1, "command": command}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/jobs", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status >= 300:
            raise RuntimeError(answer.read().decode())
        answer.read()
    connection.close()
    database = sqlite3.connect(services.root / "muster.db")
    count = "SELECT count(*) FROM jobs WHERE status = 'COMPLETED' AND job_id LIKE ?"
    while database.execute(count, (f"{name}-%",)).fetchone()[0] < jobs:
        time.sleep(0.02)
    database.close()
    seconds = time.monotonic() - began
    services.wait_for_agents()
    return seconds


def pool_seconds(*command: str) -> float:
    """Return how long a bare pool takes for the same commands."""
    began = time.monotonic()
    with ThreadPoolExecutor(SLOTS) as pool:
        list(pool.map(lambda _: subprocess.run(command, check=True), range(JOBS)))
    return time.monotonic() - began


def processor_seconds(services: Services) -> float:
    return sum(cpu_seconds(pid, with_children=True) for pid in services.pids())


def show(what: str, value: float, goal: str) -> None:
    print(f"{what:<62} {value:>10.3f}   {goal}", flush=True)


if __name__ == "__main__":
    main()
