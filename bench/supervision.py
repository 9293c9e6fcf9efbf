"""What supervision costs and how fast it acts: ``python bench/supervision.py`` or ``make bench``.

Throughput and processor time of four supervised ranks against the same four run by hand
(interleaved); submission → first step; kill -9 → seen → first new step; an idle job's cost.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from _services import Services, cpu_seconds, memory_megabytes

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.host.processes import descendants

RANKS = 4
REPETITIONS = 5
KILLS = 11
SUBMISSIONS = 25
IDLE_SECONDS = 20.0
SPARE_SECONDS = 5.0
"""Until the spare process is ready."""

ALONE = {"mode": "independent"}
TRAINING = {**ALONE, "epochs": 12, "checkpoint_every": 5, "seed": 0}
SAMPLES = 8192


def main() -> None:
    with Services() as services:
        write_dataset(
            services.root / "data",
            synthetic(samples=SAMPLES, shards=8, features=16, classes=4, seed=0),
        )
        throughput(services)
        submissions(services)
        kills(services)
        idle(services)
        memory(services)


def throughput(services: Services) -> None:
    steps, saves, ratios = [], [], []
    for number in range(REPETITIONS):
        by_hand = cpu_by_hand(services, number)
        supervised, summary, seconds = cpu_supervised(services, number)
        steps.append(summary["step"] / seconds)
        saves.append(summary["checkpoints_saved"] / seconds)
        ratios.append(supervised / by_hand)
    show("steps/s over four ranks", statistics.median(steps), ">= 2000")
    show("durable checkpoints/s over four ranks", statistics.median(saves), ">= 400")
    show("processor time, supervised / by hand", statistics.median(ratios), "<= 1.05")


def cpu_by_hand(services: Services, number: int) -> float:
    """Return the processor time of four ranks started by hand."""
    environ = os.environ | {
        "JOB_ID": f"by-hand-{number}",
        "WORLD_SIZE": str(RANKS),
        "MUSTER_EPOCHS": str(TRAINING["epochs"]),
        "CHECKPOINT_DIR": str(services.root / "checkpoints"),
        "DATASET_DIR": str(services.root / "data"),
    }
    before = os.times()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "muster", "worker"],
            env=environ | {"RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.wait()
    after = os.times()
    return (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )


def cpu_supervised(services: Services, number: int) -> tuple[float, dict, float]:
    """Return the processor time of coordinator, agent and ranks; the summary; the seconds."""
    job_id = f"supervised-{number}"
    before = processor_seconds(services)
    services.post("/jobs", {"job_id": job_id, "world_size": RANKS, **TRAINING})
    summary = services.wait_for(job_id, "COMPLETED")
    services.wait_for_agents()
    after = processor_seconds(services)
    first = min(first_step_at(services, job_id, rank, 0) for rank in range(RANKS))
    end = datetime.fromisoformat(summary["finished_at"]).timestamp()
    return after - before, summary, end - first


def processor_seconds(services: Services) -> float:
    """Return the processor time of coordinator, agents and ranks."""
    return sum(cpu_seconds(pid, with_children=True) for pid in services.supervisors())


def submissions(services: Services) -> None:
    for ranks in (1, RANKS):
        delays = []
        for number in range(SUBMISSIONS):
            job_id = f"submitted-{ranks}-{number}"
            before = time.time()
            services.post("/jobs", {"job_id": job_id, "world_size": ranks, **ALONE, "epochs": 1})
            delays.append(first_step_at(services, job_id, 0, 0) - before)
            services.wait_for(job_id, "COMPLETED")
        *_, p95 = statistics.quantiles(delays, n=20)
        what = f"POST /jobs -> first step of rank 0 of {ranks}"
        show(f"{what}, p50, s", statistics.median(delays), "<= 0.15")
        show(f"{what}, p95, s", p95, "<= 0.25")


def kills(services: Services) -> None:
    seen, stepped = [], []
    for number in range(KILLS):
        job_id = f"killed-{number}"
        services.post(
            "/jobs",
            {"job_id": job_id, "world_size": RANKS, **ALONE, "epochs": 4, "sleep_sec": 0.005},
        )
        first_step_at(services, job_id, 2, 0)
        services.wait_for(job_id, "RUNNING")
        workers = services.get(f"/jobs/{job_id}/summary")["workers"]
        killed_at = time.time()
        os.kill(workers[2]["pid"], signal.SIGKILL)
        stepped.append(first_step_at(services, job_id, 2, 1) - killed_at)
        events = services.get(f"/jobs/{job_id}/events")["events"]
        exited = next(event for event in events if event["kind"] == "rank_exited")
        seen.append(datetime.fromisoformat(exited["at"]).timestamp() - killed_at)
        services.wait_for(job_id, "COMPLETED")
    show("kill -9 -> seen by the coordinator, p50, s", statistics.median(seen), "<= 0.05")
    show(
        "kill -9 -> first new step, p50, s",
        statistics.median(stepped),
        "<= 0.3",
    )


def idle(services: Services) -> None:
    services.post("/jobs", {"job_id": "idle", "world_size": RANKS, **ALONE, "sleep_sec": 3600})
    services.wait_for("idle", "RUNNING")
    pids = {"coordinator": services.coordinator.pid, "agent": services.agents()[0]}
    time.sleep(2)
    before = {name: cpu_seconds(pid, with_children=False) for name, pid in pids.items()}
    time.sleep(IDLE_SECONDS)
    for name, pid in pids.items():
        share = (cpu_seconds(pid, with_children=False) - before[name]) / IDLE_SECONDS
        show(f"{name} with four idle ranks, % of a core", 100 * share, "<= 1")
    services.post("/jobs/idle/stop", {})
    services.wait_for("idle", "STOPPED")


def memory(services: Services) -> None:
    """Compare the memory of all processes before and after a job has started."""
    before = memory_megabytes(descendants(os.getpid()), "Pss:")
    job = {"job_id": "resident", "mode": "synchronous", "world_size": RANKS, "sleep_sec": 3600}
    services.post("/jobs", job)
    services.wait_for("resident", "RUNNING")
    time.sleep(SPARE_SECONDS)
    used = memory_megabytes(descendants(os.getpid()), "Pss:") - before
    show("memory (PSS) of four idle ranks and their spare process, MB", used, "<= 50")
    services.post("/jobs/resident/stop", {})
    services.wait_for("resident", "STOPPED")


def first_step_at(services: Services, job_id: str, rank: int, attempt: int) -> float:
    """Return when a rank's log got its first line about a step it had taken."""
    log = services.log(job_id, rank, attempt)
    while not (log.exists() and "loss" in log.read_text()):
        time.sleep(0.002)
    return log.stat().st_mtime if "is done" not in log.read_text() else first_line_at(log)


def first_line_at(log: Path) -> float:
    """Return the first entry of the log's time index: the log is complete already."""
    size_and_micros = log.with_suffix(".times").read_bytes()[:16]
    return int.from_bytes(size_and_micros[8:], "little") / 1e6


def show(what: str, value: float, goal: str) -> None:
    print(f"{what:<62} {value:>10.3f}   {goal}", flush=True)


if __name__ == "__main__":
    main()
