"""A few faults of `make chaos`: nothing may be lost."""

import subprocess
import sys
from pathlib import Path

from stress.chaos.__main__ import Plan, run
from tests.support.installation import Installation, Undisturbed, has_saved, pids, restarts

SHORT = Plan(faults=8, seed=3, minutes=0.5, jobs=2, steps=100)

LONG = {"world_size": 2, "epochs": 6, "sleep_sec": 0.05}


def test_eight_faults_lose_nothing(tmp_path: Path) -> None:
    report = run(SHORT, tmp_path, lambda _line: None)
    assert not report.has_failed, "\n".join(report.lines())
    assert report.history.strikes


def test_a_fault_by_hand_meets_one_rank_of_a_job(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = installation.submit(**LONG)
    before = installation.wait_until(job_id, has_saved)
    answer = muster_chaos(installation, job_id, "--fault", "kill", "--rank", "1")
    assert answer.returncode == 0, answer.stderr
    assert f"pid {pids(before)[1]}," in answer.stdout
    assert "rank 1 was ended by signal 9 (SIGKILL)\n" in answer.stdout
    assert "rank 1 runs again, as pid " in answer.stdout
    after = installation.wait_until(job_id, restarts(1, rank=1))
    assert pids(after)[0] in {pids(before)[0], None}
    assert installation.complete(job_id)["restarts"] == 1
    assert installation.digests(job_id, 2) == undisturbed(**LONG)
    again = muster_chaos(installation, job_id)
    assert again.returncode == 6
    assert f"{job_id} is COMPLETED" in again.stderr


def muster_chaos(installation: Installation, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli", "chaos", *words],
        env=installation.environment,
        capture_output=True,
        text=True,
        check=False,
    )
