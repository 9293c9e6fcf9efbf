"""Scripts with the Trainers of Hugging Face and Lightning that are stopped, killed and resumed."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from stress import preemption
from tests.support.installation import Installation, has_saved, restarts

# Not imported here, which would cost each worker of a test run ten seconds: only ranks use them.
for library in ("transformers", "accelerate", "lightning", "torchdata"):
    if find_spec(library) is None:
        pytest.skip(f"needs: pip install {library}", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each start imports torch and a library

EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface.py"
SLOW = f"""
import os, runpy, time
import muster.torch.huggingface as module

class Slow(module.MusterCallback):
    def on_step_begin(self, *_, **__):
        time.sleep(float(os.environ["PAUSE"]))

module.MusterCallback = Slow
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
"""So slow that it is not over before it is killed."""


def test_a_signalled_trainer_ends_with_the_same_bits(tmp_path: Path) -> None:
    report = preemption.run(tmp_path, signals=2, seed=7, kind="TERM,KILL")
    assert not report.faults, report


def test_a_killed_job_of_hugging_face_ends_with_the_same_bits(
    installation: Installation, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    command = [sys.executable, "-W", "ignore", "train.py"]
    fields = {"world_size": 1, "command": command, "working_dir": str(tmp_path)}
    fields |= {"checkpoint_every": 5}
    env = {"EPOCHS": "1", "OMP_NUM_THREADS": "1"}
    killed = installation.submit(**fields, env={**env, "PAUSE": "0.5"})
    installation.wait_until(killed, has_saved)
    installation.kill(killed, 0)
    installation.wait_until(killed, restarts(1))
    calm = installation.submit(**fields, env={**env, "PAUSE": "0"})
    shown = [installation.complete(job_id) for job_id in (killed, calm)]
    assert [(it["step"], it["total_steps"]) for it in shown] == [(32, 32)] * 2
    assert shown[1]["loss"] is not None
    logs = [installation.log(job_id, 0) for job_id in (killed, calm)]
    assert "resumes from /" in logs[0]
    digests = {digest for log in logs for digest in re.findall("sha256 ([0-9a-f]{64})", log)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("adapter", "library"), [("huggingface", "transformers"), ("lightning", "lightning")]
)
def test_a_missing_library_is_one_sentence(tmp_path: Path, adapter: str, library: str) -> None:
    (tmp_path / f"{library}.py").write_text("raise ImportError")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import muster.torch.{adapter}"
    ended = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert f"muster.torch.{adapter} needs" in ended.stderr.splitlines()[-1]
    assert "pip install" in ended.stderr.splitlines()[-1]
