"""How soon a job trains on each engine, and goes on after a loss: ``python bench/engines.py``.

Six ranks on three hosts that are namespaces of this machine, with a real sshd and a real Slurm. The
same job takes turns on one host, over SSH and on Slurm; its result has to have the same bits. The
time of an empty Slurm job is measured beside it: what is beyond it is ours. Needs root.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.clusters import ClusterInstallation, scheduler_cluster
from tests.support.installation import await_value, is_over, is_running
from tests.support.slurm import Slurm

ENGINES = {
    "local": {"engine": "local"},
    "ssh": {"hosts": ["host-0", "host-1", "host-2"]},
    "slurm": {"engine": "slurm", "engine_options": {"ranks_per_host": 2}},
}
JOB = {"mode": "synchronous", "virtual_shards": 8, "world_size": 6, "epochs": 20, "seed": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with scheduler_cluster(root, partial(Slurm, cpus=2)) as (installation, slurm):
            results = set()
            for _ in range(asked.rounds):
                found["empty Slurm job: submit -> runs"].append(empty_job(slurm, root))
                for engine, fields in ENGINES.items():
                    size = 2 if engine == "local" else 6  # as many as fit; the bits are the same
                    job_id = installation.submit(**{**JOB, **fields, "world_size": size})
                    installation.complete(job_id)
                    results.add(installation.last_digest(job_id))
                    first = seconds(installation, job_id, "submitted", "step_taken")
                    found[f"{engine}: submit -> first step"].append(first)
            for engine in ("ssh", "slurm"):
                for _ in range(asked.rounds):
                    for what, took in losses(installation, engine):
                        found[f"{engine}: {what} -> next step"].append(took)
                    slurm.start_node(installation.machines[2])
                    await_value(slurm.is_up, lambda: "a node of Slurm is not back")
    print(f"{len(results)} different results: {'the same bits' if len(results) == 1 else results}")
    for what, values in found.items():
        spread = f"({min(values):.2f} .. {max(values):.2f})"
        print(f"{what:<45} {statistics.median(values):7.2f} s  {spread}")


def empty_job(slurm: Slurm, root: Path) -> float:
    """Return how long Slurm takes to start a job that does nothing."""
    proof, script = root / f"started-{time.monotonic_ns()}", root / "empty.sh"
    script.write_text(f"#!/bin/sh\ntouch {proof}\n")
    began = time.monotonic()
    slurm.run("sbatch", "--output=/dev/null", "--chdir=/", str(script))
    await_value(proof.exists, lambda: "Slurm does not start a job")
    return time.monotonic() - began


def losses(installation: ClusterInstallation, engine: str) -> Iterator[tuple[str, float]]:
    """Yield how long the others take to go on without a rank, and without a host."""
    job_id = installation.submit(**{**JOB, **ENGINES[engine], "epochs": 10**6, "sleep_sec": 0.01})
    installation.wait_until(job_id, lambda it: is_running(it) and it["step"] > 20)
    marked = installation.marked(installation.machines[2])
    rank = next(pid for pid, tag in marked.items() if tag[:1].isdigit())
    began = time.time()
    os.kill(rank, signal.SIGKILL)
    yield "rank killed", next_step(installation, job_id, began)
    installation.wait_until(job_id, lambda it: is_running(it) and it["restarts"] == 1)
    began = time.time()
    installation.machines[2].power_off()
    yield "host without power", next_step(installation, job_id, began)
    installation.machines[2].power_on()
    installation.boot(installation.machines[2])
    installation.stop(job_id, 1.0)
    installation.wait_until(job_id, is_over)


def next_step(installation: ClusterInstallation, job_id: str, began: float) -> float:
    """Return how long after `began` ranks that have met anew took a step."""

    def look() -> float | None:
        events = installation.events(job_id)
        times = [at(it["at"]) for it in events if it["kind"] == "step_taken"]
        return next((it for it in times if it > began), None)

    return await_value(look, lambda: installation.describe(job_id)) - began


def seconds(installation: ClusterInstallation, job_id: str, first: str, last: str) -> float:
    events = {it["kind"]: at(it["at"]) for it in reversed(installation.events(job_id))}
    return events[last] - events[first]


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    main()
