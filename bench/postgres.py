"""What PostgreSQL over TCP costs, compared with SQLite: ``python bench/postgres.py [rounds]``.

Two installations, one on each, take turns: submission → first step, then durable submissions/s.
The server is one of its own on the loopback interface.
"""

import statistics
import sys
import time

from _services import Services

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from stress.load.submissions import Flood
from tests.support.postgres_server import tcp_server

ROUNDS = 5
SUBMISSIONS = 5
"""In a round."""
FLOOD_SECONDS = 4.0
SLOTS = 16
FIRST_STEP_RATIO, RATE_RATIO = 1.3, 0.8
"""Goals: at most, and at least."""


def first_step_seconds(services: Services, job_id: str) -> float:
    """Submit a job and return how long it took to its first step."""
    log = services.log(job_id, 0, 0)
    began = time.monotonic()
    services.post("/jobs", {"job_id": job_id, "world_size": 1, "mode": "independent", "epochs": 1})
    while not (log.exists() and b"loss" in log.read_bytes()):
        time.sleep(0.002)
    seconds = time.monotonic() - began
    services.wait_for(job_id, "COMPLETED")
    return seconds


def flood_rate(services: Services) -> float:
    """Return how many submissions a second are answered, each durable."""
    flood = Flood(services.port, FLOOD_SECONDS)
    flood.run()
    if flood.faults:
        raise RuntimeError(flood.faults[0])
    return flood.rate


def main(rounds: int) -> int:
    with (
        tcp_server() as server,
        server.database("bench") as url,
        Services(SLOTS) as on_file,
        Services(SLOTS, database_url=url) as on_server,
    ):
        both = {"SQLite": on_file, "PostgreSQL": on_server}
        delays: dict[str, list[float]] = {name: [] for name in both}
        rates: dict[str, list[float]] = {name: [] for name in both}
        data = synthetic(samples=256, shards=1, features=16, classes=4, seed=0)
        for services in both.values():
            write_dataset(services.root / "data", data)
        for number in range(rounds * SUBMISSIONS):
            for name, services in both.items():
                delays[name].append(first_step_seconds(services, f"job-{number}"))
        for services in both.values():  # the others wait, so that only services and clients run
            holder = services.post("/jobs", {"world_size": SLOTS, "command": ["sleep", "3600"]})
            services.wait_for(holder["job_id"], "RUNNING")
        for _ in range(rounds):
            for name, services in both.items():
                rates[name].append(flood_rate(services))
    slower = statistics.median(delays["PostgreSQL"]) / statistics.median(delays["SQLite"])
    ratios = [new / old for new, old in zip(rates["PostgreSQL"], rates["SQLite"], strict=True)]
    for name in both:
        print(
            f"{name:10} POST /jobs -> first step, p50: {statistics.median(delays[name]):.3f} s; "
            f"durable submissions/s: {statistics.median(rates[name]):.0f}"
        )
    print(f"first step, PostgreSQL / SQLite: {slower:.2f} (goal: <= {FIRST_STEP_RATIO})")
    print(
        f"submissions/s, PostgreSQL / SQLite: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}; goal: >= {RATE_RATIO})"
    )
    is_met = slower <= FIRST_STEP_RATIO and statistics.median(ratios) >= RATE_RATIO
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(*(map(int, sys.argv[1:]) if sys.argv[1:] else [ROUNDS])))
