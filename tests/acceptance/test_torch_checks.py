"""`muster check` says whether a script keeps its bits, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muster.host.processes import all_pids, read_environment
from tests.support.installation import await_value
from tests.support.torch_jobs import SMALL

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a dozen starts with torch

CHECK = [sys.executable, "-P", "-m", "muster", "check", "--python", sys.executable]


def check(
    directory: Path, noise: str, small: str = SMALL, *, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run `muster check` on a small script that adds `noise` to its batches.

    One rank, of three jobs, is enough to find a difference: each more loads torch once per job.
    """
    script = directory / "train.py"
    script.write_text(
        f"{small.replace('32)', '32, check=False)')}\nown = torch.Generator().manual_seed(1)\n"
        f"for (x,) in run.shards():\n    run.backward(model(x + {noise}).square().mean())\n"
        "open('exported', 'w')"
    )
    words = [*CHECK, "-n", str(ranks), "--steps", "2", str(script)]
    return subprocess.run(words, cwd=directory, capture_output=True, text=True, check=False)


def test_a_check_of_a_pure_script_finds_the_same_bits(tmp_path: Path) -> None:
    done = check(tmp_path, "torch.randn(x.shape)", ranks=2)
    assert (done.returncode, done.stdout.count("the same bits")) == (0, 4), done
    assert "2 ranks, one of them killed in step 2: the same bits" in done.stdout
    assert not (tmp_path / "exported").exists()


def test_a_check_names_the_step_that_differs(tmp_path: Path) -> None:
    done = check(tmp_path, "torch.randn(x.shape, generator=own)")
    assert done.returncode == 1, done
    assert "resumed from there: differs from step 2 on: model.bias, model.weight" in done.stdout
    assert "docs/pytorch.md" in done.stderr


def test_a_check_of_a_script_without_a_seed_says_so(tmp_path: Path) -> None:
    seeded_later = SMALL.replace("manual_seed(0)", "seed()").replace(
        "data =", "torch.manual_seed(0)\ndata ="
    )
    done = check(tmp_path, "0", seeded_later)
    assert (done.returncode, done.stdout.count("differs from step 1 on")) == (1, 1), done
    assert "Call torch.manual_seed(0) before" in done.stderr


STARTS, TRAINS_NOW = "tmp/muster-check-*/*", "trains"
ENDS_OF_CHECKS = [
    (signal.SIGTERM, STARTS),
    (signal.SIGTERM, TRAINS_NOW),
    (signal.SIGKILL, TRAINS_NOW),
]


@pytest.mark.parametrize(("number", "moment"), ENDS_OF_CHECKS)
def test_a_check_that_a_signal_ends_leaves_nothing(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    script, temporary = tmp_path / "train.py", tmp_path / "tmp"
    script.write_text(
        f"import pathlib, time\n{SMALL.replace('32)', '32, epochs=9999)')}\n"
        "for (x,) in run.shards():\n    pathlib.Path('trains').touch()\n"
        "    time.sleep(0.01)\n    run.backward(model(x).square().mean())\n"
    )
    temporary.mkdir()
    began = subprocess.Popen(
        [*CHECK, "-n", "2", "--steps", "9999", str(script)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )

    def left() -> list[int]:
        return [pid for pid in all_pids() if bytes(tmp_path) in read_environment(pid)]

    try:
        await_value(lambda: [*tmp_path.glob(moment)], lambda: f"{left()}", 200)
        began.send_signal(number)
    finally:
        began.send_signal(signal.SIGTERM)  # another one, as `timeout` sends it
    _, said = began.communicate()
    if number == signal.SIGKILL:
        await_value(lambda: not left(), lambda: f"{left()}")
        return
    assert began.returncode == 130, said
    assert not left()
    assert not [*temporary.glob("muster-check-*")]
