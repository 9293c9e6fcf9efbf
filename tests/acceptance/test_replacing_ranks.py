"""A rank that dies, hangs or stops is replaced; the other ranks continue."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from stress.random_kills import survive_kills
from tests.support.installation import (
    Installation,
    Undisturbed,
    await_end,
    has_saved,
    pids,
    records,
    restarts,
)
from tests.support.pools import PooledJob

LONG = {"world_size": 2, "epochs": 6, "sleep_sec": 0.08}
"""Two ranks of 96 steps and more than seven seconds: time to be interrupted."""


def test_a_world_size_is_enough_to_train(installation: Installation) -> None:
    job_id = installation.submit(world_size=4)
    seen = installation.complete(job_id)
    assert [worker["process"] for worker in seen["workers"]] == ["finished"] * 4
    assert pids(seen) == [None] * 4
    assert seen["step"] == seen["total_steps"] == 4 * 8
    assert installation.job(job_id)["exit_code"] == 0


def test_a_killed_rank_is_replaced_and_ends_with_the_same_bits(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = installation.submit(**LONG)
    before = installation.wait_until(job_id, has_saved)
    killed = installation.kill(job_id, rank=1)
    after = installation.wait_until(job_id, restarts(1, rank=1))
    assert pids(after)[0] == pids(before)[0]
    assert pids(after)[1] not in {None, killed}
    seen = installation.complete(job_id)
    assert [worker["restarts"] for worker in seen["workers"]] == [0, 1]
    assert "goes on from its checkpoint" in installation.log(job_id, rank=1)
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_random_kills_change_no_bit(installation: Installation, undisturbed: Undisturbed) -> None:
    fields = {"world_size": 4, "epochs": 8, "sleep_sec": 0.05}
    job_id = survive_kills(installation, kills=4, seed=1, **fields)
    assert installation.digests(job_id, 4) == undisturbed(**fields)


def test_a_rank_that_hangs_is_replaced(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = installation.submit(**LONG, heartbeat_timeout=1, max_restarts=0)
    stopped = records(installation.wait_until(job_id, has_saved))[0]
    installation.kill(job_id, rank=0, number=signal.SIGSTOP)
    installation.wait_until(job_id, restarts(1, rank=0))
    await_end([stopped])  # so nothing is left that SIGCONT could wake
    seen = installation.complete(job_id)
    # A hang has a budget of its own.
    assert (seen["endings"]["hang"], seen["endings"]["crash"]) == (1, 0)
    assert "rank_suspected" in installation.kinds(job_id)
    told = [event["message"] for event in installation.events(job_id)]
    assert "rank 0 sent no heartbeat for 1 s and was killed" in told
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_a_crash_loop_fails_the_job_and_says_how(installation: Installation) -> None:
    command = ["sh", "-c", "echo the reactor is cold; exit 3"]
    job_id = installation.submit(world_size=1, command=command, max_restarts=2)
    job = installation.fail(job_id)
    assert job["reason"] == "restart_limit"
    assert job["exit_code"] == 3
    assert "rank 0 exited with code 3 and has used its 2 restarts" in job["message"]
    assert "the reactor is cold" in job["message"]
    assert installation.kinds(job_id).count("rank_started") == 3


CRASHING = """
import itertools, os
import numpy as np
from muster.program import Contribution

class Crashing:
    calls = itertools.count()
    def initial(self, seed):
        return {"w": np.zeros(4, np.float32)}
    def gradient(self, state, batch, random):
        if next(self.calls) == 2:  # the first call learns the shapes, the second one is a step
            os._exit(3)
        return Contribution({"w": np.ones(4, np.float32)}, 0.0)
    def update(self, state, gradients, step):
        return {"w": state["w"] - gradients["w"]}
"""


def test_a_crash_after_every_step_fails_the_job(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CRASHING)
    job_id = installation.submit(
        mode="synchronous",
        world_size=1,
        program="program.py:Crashing",
        working_dir=str(tmp_path),
        virtual_shards=1,
        checkpoint_every=1,
        max_restarts=3,
    )
    job = installation.fail(job_id)
    assert job["reason"] == "restart_limit"
    assert "rank 0 exited with code 3 and has used its 3 restarts" in job["message"]
    assert installation.see(job_id)["step"] == 4, "each attempt takes a step"


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


def test_faults_again_and_again_are_summed_up(installation: Installation) -> None:
    # Many epochs: a job that ends meanwhile takes the last fault with it.
    job = PooledJob(installation, world_size=3, epochs=60)
    job.trains_with(0, 1, 2)
    answer = muster_chaos(installation, job.job_id, "--every", "0.7", "--for", "12")
    assert answer.returncode == 0, answer.stderr
    told = re.search(r"goodput -?\d\.\d\d: .*\n(\d+) faults \(SIGKILL\)\n", answer.stdout)
    assert told is not None, answer.stdout
    rows = re.findall(r"^the .*?  +(\d+)  +(\d+)  +(\d+)$", answer.stdout, re.MULTILINE)
    assert len(rows) == 3, answer.stdout
    assert all(0 < int(p50) <= int(p95) <= int(worst) for p50, p95, worst in rows)
    assert "is durable" in answer.stdout or "exactly once" in answer.stdout
    assert int(told[1]) >= 2
    job.wait_until(lambda: job.see()["endings"].get("killed") == int(told[1]))
    job.completes()


def test_a_paused_job_is_not_struck_again_and_again(installation: Installation) -> None:
    job = PooledJob(installation, world_size=1)
    job.trains_with(0)
    job.pauses()
    job.wait_for_status("PAUSED")
    refused = muster_chaos(installation, job.job_id, "--every", "1")
    assert refused.returncode == 6
    assert f"muster wait {job.job_id} --until RUNNING" in refused.stderr
    assert job.see()["endings"]["killed"] == 0


def muster_chaos(installation: Installation, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli", "chaos", *words],
        env=installation.environment,
        capture_output=True,
        text=True,
        check=False,
    )
