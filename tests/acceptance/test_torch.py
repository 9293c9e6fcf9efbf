"""Unmodified torchrun scripts with the real torch, if it is installed."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.support.installation import Installation, is_running

PROGRAM = Path(__file__).parents[1] / "support" / "ddp_program.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def submit(installation: Installation, directory: Path, **fields: object) -> str:
    directory.mkdir()
    command = [sys.executable, str(PROGRAM), str(directory)]
    return installation.submit(
        **{"world_size": 2, "restart_scope": "gang", "command": command, **fields}
    )


def weights(installation: Installation, job_id: str, rank: int) -> str:
    return installation.log(job_id, rank).splitlines()[-1]


def test_a_gloo_group_resumes_after_a_kill_with_the_same_bits(
    installation: Installation, tmp_path: Path
) -> None:
    calm = submit(installation, tmp_path / "calm")
    installation.complete(calm)
    job_id = submit(installation, tmp_path / "killed")
    saved = tmp_path / "killed" / "state.pt"
    installation.wait_until(job_id, lambda seen: is_running(seen) and saved.exists())
    installation.kill(job_id, 1)
    seen = installation.complete(job_id)
    assert [worker["restarts"] for worker in seen["workers"]] == [0, 1]
    begun = re.findall(r"goes on from step (\d+)", installation.log(job_id, 1))
    assert int(begun[-1]) > 0
    assert {weights(installation, job_id, rank) for rank in range(2)} == {
        weights(installation, calm, 0)
    }


def test_the_error_file_of_record_is_the_exit_message(
    installation: Installation, tmp_path: Path
) -> None:
    job_id = submit(installation, tmp_path / "failing", max_restarts=0)
    (tmp_path / "failing" / "fail").touch()
    job = installation.fail(job_id)
    why = "rank 1 exited with code 1 (ValueError: no such optimizer) and may not be restarted"
    assert job["message"].startswith(why)
    found = installation.request("GET", f"/jobs/{job_id}/incarnations").json()["incarnations"]
    blamed = [one for one in found if one["retry_class"] == "crash"]
    assert [(one["rank"], one["reason"], one["message"]) for one in blamed] == [
        (1, "worker_exited", "exited with code 1 (ValueError: no such optimizer)")
    ]
