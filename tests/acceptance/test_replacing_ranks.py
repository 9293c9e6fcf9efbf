"""A rank that dies, hangs or stops is replaced; the other ranks continue."""

import signal
import sys
from pathlib import Path

import pytest

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

LONG = {"world_size": 2, "epochs": 4, "sleep_sec": 0.03}
"""Two ranks of 64 steps and two seconds: time to be interrupted."""


def test_a_world_size_is_enough_to_train(installation: Installation) -> None:
    job_id = installation.submit(world_size=4)
    seen = installation.complete(job_id)
    assert [worker["state"] for worker in seen["workers"]] == ["finished"] * 4
    assert pids(seen) == [None] * 4
    assert seen["step"] == seen["total_steps"] == 4 * 8
    assert installation.job(job_id)["exit_code"] == 0


def test_the_checkpoints_of_a_completed_job_account_for_every_line(
    installation: Installation,
) -> None:
    job_id = installation.submit(world_size=3)
    installation.complete(job_id)
    positions = [checkpoint.position for checkpoint in installation.checkpoints(job_id, 3)]
    assert [position.consumed for position in positions] == [192, 192, 128]


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


def test_eight_random_kills_change_no_bit(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    fields = {"world_size": 4, "epochs": 10, "sleep_sec": 0.06}
    job_id = survive_kills(installation, kills=8, seed=1, **fields)
    assert installation.digests(job_id, 4) == undisturbed(**fields)


def test_a_rank_that_hangs_is_replaced(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = installation.submit(**LONG, heartbeat_timeout=3)
    stopped = records(installation.wait_until(job_id, has_saved))[0]
    installation.kill(job_id, rank=0, number=signal.SIGSTOP)
    installation.wait_until(job_id, restarts(1, rank=0))
    await_end([stopped])  # so nothing is left that SIGCONT could wake
    installation.complete(job_id)
    assert "rank_suspected" in installation.kinds(job_id)
    told = [event["message"] for event in installation.events(job_id)]
    assert "rank 0 sent no heartbeat for 3 s and was killed" in told
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_a_rank_that_beats_and_takes_no_step_is_replaced(
    installation: Installation, tmp_path: Path
) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(
        "import time, muster\n"
        "run = muster.join()\n"
        "run.step()\n"
        "while run.restart_count == 0: time.sleep(0.1)\n"
    )
    job_id = installation.submit(
        world_size=1, command=[sys.executable, str(script)], progress_timeout_seconds=1
    )
    installation.complete(job_id)
    told = [event["message"] for event in installation.events(job_id)]
    assert "rank 0 sent heartbeats but took no step for 1 s and was killed" in told


def test_a_crash_loop_fails_the_job_and_says_how(installation: Installation) -> None:
    command = ["sh", "-c", "echo the reactor is cold; exit 3"]
    job_id = installation.submit(world_size=1, command=command, max_restarts=2)
    job = installation.fail(job_id)
    assert job["reason"] == "restart_limit"
    assert job["exit_code"] == 3
    assert "rank 0 exited with code 3 and has used its 2 restarts" in job["message"]
    assert "the reactor is cold" in job["message"]
    assert installation.kinds(job_id).count("rank_started") == 3


def test_a_crash_loop_by_signal_is_told_as_one(installation: Installation) -> None:
    command = ["sh", "-c", "kill -ABRT $$"]
    job_id = installation.submit(world_size=1, command=command, max_restarts=0)
    job = installation.fail(job_id)
    assert "rank 0 was ended by signal 6 (SIGABRT)" in job["message"]
    assert job["exit_code"] == 128 + signal.SIGABRT


@pytest.mark.parametrize("command", [["no-such-program-anywhere"], ["/etc/passwd"], ["/"]])
def test_a_command_that_cannot_be_run_is_not_tried_again(
    installation: Installation, command: list[str]
) -> None:
    job = installation.fail(installation.submit(world_size=1, command=command))
    assert job["reason"] == "invalid_program"
    assert f"the command {command[0]!r} cannot be run" in job["message"]
    assert installation.kinds(job["job_id"]).count("rank_started") == 1
