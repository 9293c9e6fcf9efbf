"""The end of a process is part of its life: a slow exit is no hang, and its code still counts."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.support.installation import Installation, await_value

TRAINING = """
import atexit, ctypes, pathlib, sys
import muster

def upload():
    print("uploads", flush=True)
    while not pathlib.Path(sys.argv[1]).exists():
        ctypes.PyDLL(None).sleep(2)  # keeps the GIL, so no heartbeat is sent

atexit.register(upload)
run = muster.join()
for batch in run.batches():
    run.step()
"""


def submitted(installation: Installation, gate: Path, script: str, **fields: object) -> str:
    return installation.submit(
        world_size=1,
        command=[sys.executable, "-c", script, str(gate)],
        heartbeat_timeout=1,
        **fields,
    )


def await_slow_exit(installation: Installation, job_id: str) -> None:
    await_value(
        lambda: "slow_exit" in installation.kinds(job_id), lambda: installation.describe(job_id)
    )
    (worker,) = installation.see(job_id)["workers"]
    assert (worker["process"], worker["restarts"]) == ("exiting", 0)


def test_a_slow_exit_of_a_finished_rank_completes_its_job(
    installation: Installation, tmp_path: Path
) -> None:
    job_id = submitted(installation, tmp_path / "gate", TRAINING)
    await_slow_exit(installation, job_id)
    (tmp_path / "gate").touch()
    (worker,) = installation.complete(job_id)["workers"]
    assert worker["restarts"] == 0


@pytest.mark.parametrize("code", [3, 255])
def test_the_code_of_a_slow_exit_counts(
    installation: Installation, tmp_path: Path, code: int
) -> None:
    script = f"{TRAINING}\nsys.exit({code})"
    job_id = submitted(installation, tmp_path / "gate", script, max_restarts=0)
    await_slow_exit(installation, job_id)
    (tmp_path / "gate").touch()
    assert f"exited with code {code}" in installation.fail(job_id)["message"]


def test_a_trainer_below_a_python_parent_joins(installation: Installation, tmp_path: Path) -> None:
    parent = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    command = [sys.executable, "-c", parent, sys.executable, "-c", TRAINING, str(tmp_path / "gate")]
    job_id = installation.submit(world_size=1, command=command, heartbeat_timeout=1)
    await_slow_exit(installation, job_id)
    (tmp_path / "gate").touch()
    (worker,) = installation.complete(job_id)["workers"]
    assert worker["step"] == worker["total_steps"] > 0


def test_a_script_killed_in_its_first_training_runs_its_second(
    installation: Installation, tmp_path: Path
) -> None:
    python = shlex.join([sys.executable, "-c", TRAINING, str(tmp_path / "gate")])
    job_id = installation.submit(
        world_size=1, command=["sh", "-c", f"{python}; echo second"], heartbeat_timeout=1
    )
    await_slow_exit(installation, job_id)
    os.killpg(installation.see(job_id)["workers"][0]["pid"], signal.SIGKILL)
    (tmp_path / "gate").touch()
    installation.complete(job_id)
    assert "second" in installation.log(job_id)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_rank_killed_after_it_has_finished_is_not_started_again(
    installation: Installation, tmp_path: Path, number: signal.Signals
) -> None:
    job_id = submitted(installation, tmp_path / "gate", TRAINING)
    await_slow_exit(installation, job_id)
    installation.kill(job_id, 0, number)
    installation.complete(job_id)
    assert installation.log(job_id).count("uploads") == 1
    assert any("after it had finished" in event["message"] for event in installation.events(job_id))


def test_a_rank_that_does_not_exit_within_its_grace_is_killed(
    installation: Installation, tmp_path: Path
) -> None:
    without_end = TRAINING.replace("for batch in run.batches():", "for _ in range(3):")
    job_id = submitted(
        installation, tmp_path / "gate", without_end, exit_grace_seconds=3, max_hangs=0
    )
    assert "did not exit within 3 s and was killed" in installation.fail(job_id)["message"]


def test_a_script_that_goes_on_after_its_training_is_no_hang(
    installation: Installation, tmp_path: Path
) -> None:
    training = TRAINING.replace("atexit.register(upload)", "")
    python = shlex.join([sys.executable, "-c", training])
    gate = shlex.quote(str(tmp_path / "gate"))
    script = f"{python}; echo trained; while ! test -e {gate}; do sleep 0.1; done; exit 3"
    job_id = installation.submit(
        world_size=1, command=["sh", "-c", script], heartbeat_timeout=1, max_restarts=0
    )
    await_value(
        lambda: (
            installation.see(job_id)["workers"][0]["last_heartbeat_age_seconds"] is None
            and "trained" in installation.log(job_id)
        ),
        lambda: installation.describe(job_id),
    )
    (tmp_path / "gate").touch()
    assert "exited with code 3" in installation.fail(job_id)["message"]
