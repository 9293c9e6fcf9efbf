"""The examples with the real torch, if it is installed: a kill in the middle, and equal bits."""

import re
import sys
from pathlib import Path

import pytest

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from tests.support.installation import Installation, has_saved, is_running, restarts
from tests.support.undisturbed import bits

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # eight starts with torch

EXAMPLES = Path(__file__).parents[2] / "examples"

RAISING = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("no such optimizer")
main()
"""


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("points")
    write_dataset(directory, synthetic(samples=1024, shards=4, features=16, classes=4))
    return str(directory)


def test_ddp_example_resumes_after_a_kill_with_the_same_bits(
    installation: Installation, tmp_path: Path
) -> None:
    command = [sys.executable, str(EXAMPLES / "ddp.py")]
    fields = {"world_size": 2, "restart_scope": "gang", "command": command}
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    calm = installation.submit(**fields, working_dir=str(tmp_path / "calm"))
    installation.complete(calm)
    killed = installation.submit(**fields, working_dir=str(tmp_path / "killed"))
    saved = tmp_path / "killed" / "checkpoints"
    installation.wait_until(killed, lambda seen: is_running(seen) and [*saved.glob("*.pt")])
    installation.kill(killed, 1)
    seen = installation.complete(killed)
    assert [worker["restarts"] for worker in seen["workers"]] == [0, 1]
    begun = re.findall(r"begins after step (\d+)", installation.log(killed, 1))
    assert int(begun[-1]) > 0
    ends = [installation.log(job_id, 0).splitlines()[-1] for job_id in (calm, killed)]
    assert "ends with weights of sum" in ends[0]
    assert ends[0] == ends[1]


def test_torch_program_has_the_same_bits_after_a_kill_and_scaling(
    installation: Installation, points: str
) -> None:
    program = f"{EXAMPLES}/torch_program.py:Net"
    fields = {"mode": "synchronous", "program": program, "dataset_dir": points, "epochs": 5}
    fields |= {"spare_ranks": 0}  # each loads torch, too
    calm = installation.submit(**fields, world_size=1)
    job_id = installation.submit(**fields, world_size=2, max_workers=3, sleep_sec=0.1)
    installation.wait_until(job_id, lambda seen: seen["step"] > 5 and seen["workers"][1]["pid"])
    installation.kill(job_id, 1)
    installation.wait_until(job_id, restarts(1, rank=1))
    scaled = installation.request("PATCH", f"/jobs/{job_id}", json={"world_size": 3})
    assert scaled.is_success, scaled.text
    installation.complete(job_id)
    installation.complete(calm)
    assert bits(installation, job_id) == bits(installation, calm)


def test_torch_state_of_a_script_resumes_after_a_kill_with_the_same_bits(
    installation: Installation, points: str
) -> None:
    command = [sys.executable, str(EXAMPLES / "torch_aware.py")]
    fields = {"world_size": 1, "command": command, "dataset_dir": points, "epochs": 2}
    calm = installation.submit(**fields)
    job_id = installation.submit(**fields, sleep_sec=0.1)
    installation.wait_until(job_id, has_saved)
    installation.kill(job_id, 0)
    installation.complete(job_id)
    installation.complete(calm)
    begun = re.findall(r"begins after step (\d+)", installation.log(job_id, 0))
    assert int(begun[-1]) > 0
    assert installation.digests(job_id, 1) == installation.digests(calm, 1)


def test_the_error_file_of_record_is_the_exit_message(installation: Installation) -> None:
    job_id = installation.submit(
        world_size=1, command=[sys.executable, "-c", RAISING], max_restarts=0
    )
    job = installation.fail(job_id)
    why = "rank 0 exited with code 1 (ValueError: no such optimizer) and may not be restarted"
    assert job["message"].startswith(why)
    found = installation.request("GET", f"/jobs/{job_id}/attempts").json()["attempts"]
    blamed = [one for one in found if one["retry_class"] == "crash"]
    assert [(one["rank"], one["reason"], one["message"]) for one in blamed] == [
        (0, "worker_exited", "exited with code 1 (ValueError: no such optimizer)")
    ]
