"""The curves of the page: their order, in what jobs differ, and the arithmetic of the scripts."""

import shutil
import subprocess
from pathlib import Path

import pytest

from api.page.texts import differences, in_order

SCRIPTS = Path(__file__).parent / "curves.test.mjs"


NODE = shutil.which("node")


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="needs: apt-get install nodejs")
def test_scripts_compute_curves() -> None:
    done = subprocess.run(
        [str(NODE), "--test", SCRIPTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_loss_and_throughput_come_first() -> None:
    names = ["accuracy", "throughput_steps_per_sec", "val_loss", "loss"]
    assert in_order(names) == ["loss", "throughput_steps_per_sec", "accuracy", "val_loss"]


def test_only_fields_that_differ_are_shown() -> None:
    one = {"epochs": 3, "env": {"SEED": "1", "LR": "0.1"}, "command": ["a"], "name": None}
    other = {"epochs": 3, "env": {"SEED": "2", "LR": "0.1"}, "command": ["a", "b"], "name": "x"}
    assert differences([one, other]) == {
        "env.SEED": ["1", "2"],
        "command": ["a", "a b"],
        "name": ["–", "x"],  # noqa: RUF001  as on the page
    }
    assert differences([{"env": {}}, {"env": {"LR": "1"}}]) == {"env.LR": ["–", "1"]}  # noqa: RUF001
