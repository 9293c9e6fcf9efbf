"""Cost of a request, accepted jobs per second, and time to list jobs among many.

``python -m stress.load.answers`` starts services, measures them from this process, prints the
figures with their goals, and exits with 1 if a goal is missed. All figures but the first depend on
other load on the machine.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from stress.load.bare_service import PATH, bare_service
from stress.load.client import Connection, get, port_of
from stress.load.figures import Figure, at_most, report
from stress.load.lists import list_figures
from stress.load.submissions import postgres_figures, sqlite_figures
from tests.support.installation import Installation
from tests.support.usage import processor_seconds

COST_GOAL = 5.0
"""Of the status of one job, in empty routes."""

ROUND = 200
"""Requests to the one before the other has its turn."""


def figures(root: Path, *, rounds: int, seconds: float, jobs: int) -> Iterator[Figure]:
    yield cost_figure(root / "cost", rounds)
    yield from sqlite_figures(root / "sqlite", seconds)
    yield from postgres_figures(root / "postgres", seconds)
    yield from list_figures(root / "lists", jobs)


def cost_figure(root: Path, rounds: int) -> Figure:
    """Compare the processor time of `GET /jobs/{id}` with that of a route that does nothing."""
    root.mkdir()
    installation = Installation(root)
    installation.start_api()
    try:
        with bare_service() as (bare_pid, bare_port):
            ratio = _ratio(installation, bare_pid, bare_port, rounds)
    finally:
        installation.close()
    return at_most("GET /jobs/{id}: processor time ÷ an empty route", ratio, COST_GOAL, "")


def _ratio(installation: Installation, bare_pid: int, bare_port: int, rounds: int) -> float:
    job_id = installation.submit(world_size=1, command=["true"])
    ratios = []
    with Connection(port_of(installation.url)) as ours, Connection(bare_port) as theirs:
        for _ in range(rounds):
            empty = _seconds_each(theirs, get(PATH), bare_pid)
            job = _seconds_each(ours, get(f"/jobs/{job_id}"), installation.api.pid)
            ratios.append(job / empty)
    return median(ratios[1:] or ratios)  # the first round includes warm-up


def _seconds_each(connection: Connection, request: bytes, pid: int) -> float:
    began = processor_seconds(pid)
    for _ in range(ROUND):
        assert connection.ask(request).status == 200
    return (processor_seconds(pid) - began) / ROUND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=16, help="rounds of the comparison (16)")
    parser.add_argument("--seconds", type=float, default=15, help="seconds of submissions (15)")
    parser.add_argument("--jobs", type=int, default=10_000, help="finished jobs to list (10000)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = list(
            figures(Path(directory), rounds=asked.rounds, seconds=asked.seconds, jobs=asked.jobs)
        )
    print("\n".join(report(found)), flush=True)
    return int(not all(figure.is_met for figure in found))


if __name__ == "__main__":
    sys.exit(main())
