"""User scripts: one without Muster, and one that imports it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.installation import Installation, has_saved, restarts, without_ours

PLAIN = """
import json, os
place = {name: os.environ.get(name) for name in
         ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "MINE")}
print(json.dumps(place))
"""

OURS = """
import numpy as np
import muster

run = muster.join()
state = run.restore() or {"sum": np.zeros(8)}
for batch in run.batches():
    state["sum"] += sum(np.asarray(sample["x"]) for sample in batch) * (run.steps_done + 1)
    run.step(loss=float(state["sum"].sum()), answer=42.0)
    if run.should_checkpoint or run.should_stop:
        run.checkpoint(state)
    run.rest(run.settings.sleep_sec)
    if run.should_stop:
        break
run.checkpoint(state)
print("sum", state["sum"].sum())
"""


def test_a_script_that_does_not_know_us_finds_its_place(
    installation: Installation, tmp_path: Path
) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    command = [sys.executable, script.name]
    job_id = installation.submit(
        world_size=2, command=command, working_dir=str(tmp_path), env={"MINE": "yes"}
    )
    installation.complete(job_id)
    for rank in range(2):
        assert json.loads(installation.log(job_id, rank)) == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "MINE": "yes",
        }
    assert run_alone(script).returncode == 0


def test_a_users_own_worker_module_is_the_users(installation: Installation, tmp_path: Path) -> None:
    for name in ("worker", "coordinator", "api"):
        (tmp_path / f"{name}.py").write_text(f"place = 'the {name} of the user'\n")
    (tmp_path / "train.py").write_text("import worker, api; print(worker.place, api.place)\n")
    command = [sys.executable, "train.py"]
    job_id = installation.submit(world_size=1, command=command, working_dir=str(tmp_path))
    installation.complete(job_id)
    assert installation.log(job_id) == "the worker of the user the api of the user\n"


def test_a_script_with_our_handle_is_watched_and_resumes_exactly(
    installation: Installation, tmp_path: Path
) -> None:
    script = tmp_path / "ours.py"
    script.write_text(OURS)
    fields = {"world_size": 2, "epochs": 3, "command": [sys.executable, str(script)]}
    calm = installation.submit(**fields)
    job_id = installation.submit(**fields, sleep_sec=0.12)
    installation.wait_until(job_id, has_saved)
    installation.kill(job_id, 1)
    seen = installation.wait_until(job_id, restarts(1, rank=1))
    assert seen["loss"] is not None
    seen = installation.complete(job_id)
    assert [worker["step"] for worker in seen["workers"]] == [48, 48]
    assert [worker["shard_idx"] for worker in seen["workers"]] == [3, 3]
    installation.complete(calm)
    assert installation.digests(job_id, 2) == installation.digests(calm, 2)


def test_a_script_takes_its_samples_one_by_one(installation: Installation, tmp_path: Path) -> None:
    script = tmp_path / "counting.py"
    script.write_text("import muster\nprint(sum(1 for _ in muster.join().samples()))\n")
    job_id = installation.submit(world_size=3, command=[sys.executable, str(script)])
    installation.complete(job_id)
    assert [int(installation.log(job_id, rank)) for rank in range(3)] == [192, 192, 128]


def test_the_same_script_runs_alone(installation: Installation, tmp_path: Path) -> None:
    script = tmp_path / "ours.py"
    script.write_text(OURS)
    data = installation.environment["DATASET_DIR"]
    first, second = (run_alone(script, DATASET_DIR=data) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    assert first.stdout == second.stdout
    job_id = installation.submit(world_size=1, command=[sys.executable, str(script)])
    installation.complete(job_id)
    assert installation.log(job_id) == first.stdout


def run_alone(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env={**without_ours(os.environ), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
