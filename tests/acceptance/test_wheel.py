"""The wheel, installed into an environment of its own and used there."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.contracts.settings.paths import DataDir
from muster.host.containment import tagged_processes
from muster.host.processes import send_signal
from tests.support.environments import ROOT, Environment, build_wheel
from tests.support.installation import DEADLINE_SECONDS, without_ours

PROGRAM = "together.py:Points"


class Installed:
    """A project of a user, whose own modules are named like ours, and the commands typed in it."""

    def __init__(self, root: Path, environment: Environment) -> None:
        self.root = root
        self.environment = environment
        self.files = DataDir(root / "data")
        self.environ = {
            **without_ours(os.environ),
            "PATH": f"{environment.bin}:/usr/bin:/bin",
            "PYTHONPATH": str(root),
            "MUSTER_DATA_DIR": str(self.files.root),
            "CHECKPOINT_DIR": str(root / "checkpoints"),
            "DATASET_DIR": str(root / "shards"),
            "MUSTER_PORT": "0",
        }
        for name in ("api", "cli", "coordinator", "database", "worker"):
            (root / f"{name}.py").write_text("OWNER = 'the user'\n")
        program = (ROOT / "examples" / "together.py").read_text()
        owner = "import api, worker\nassert api.OWNER == worker.OWNER == 'the user'\n"
        (root / "together.py").write_text(program.replace("import numpy", f"{owner}import numpy"))

    def muster(self, *words: str, code: int = 0) -> str:
        ended = subprocess.run(
            [str(self.environment.bin / "muster"), *words],
            cwd=self.root,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        log = self.files.services_log
        assert ended.returncode == code, (
            ended.stdout + ended.stderr + (log.read_text() if log.exists() else "")
        )
        return ended.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    environment = Environment(tmp_path / "environment")
    environment.install(build_wheel(tmp_path / "dist"))
    (tmp_path / "project").mkdir()
    installed = Installed(tmp_path / "project", environment)
    yield installed
    installed.muster("down")


def test_wheel_adds_one_name_and_trains_beside_modules_of_that_name(installed: Installed) -> None:
    listed = installed.environment.pip("show", "-f", "muster-train").partition("Files:")[2].split()
    folders = {Path(file).parts[0] for file in listed} - {".."}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"muster"}

    installed.muster("dataset", "synthetic", "--out", "shards", "--samples", "512", "--shards", "4")
    installed.muster("up", "-d")
    words = ("--program", PROGRAM, "--set", "epochs=8")
    installed.muster(
        "submit", "-d", "--id", "hit", "-n", "2", *words, "-e", "X=1", "--set", "sleep_sec=0.1"
    )
    installed.muster("wait", "hit", "--until", "RUNNING")
    uid = installed.files.job("hit").owner.read_text().strip()
    (rank,) = tagged_processes(f"{uid}/1/")
    send_signal(rank, signal.SIGKILL)
    installed.muster("wait", "hit")
    assert re.search("rank 1 .*SIGKILL", installed.muster("events", "hit"))
    installed.muster("submit", "--id", "alone", "-n", "1", *words)  # forked, the other executed
    installed.muster("checkpoint", "diff", "hit", "alone")

    (installed.root / "train.py").write_text("import muster, api\nprint(muster.join().rank, api)\n")
    printed = installed.muster("run", "-n", "2", "train.py")
    assert printed.count(str(installed.root / "api.py")) == 2
    printed = installed.environment.output("import muster, sys; print(*sys.path)")
    assert "_services" not in printed


def test_wheel_of_another_checkout_has_the_same_bytes(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    project = ["pyproject.toml", "README.md", "LICENSE", ".gitignore"]
    packages = ["muster", "api", "cli", "coordinator", "database", "migrations", "worker"]
    for name in packages:
        shutil.copytree(ROOT / name, copy / name, copy_function=shutil.copyfile)  # as of now
    for name in project:
        shutil.copyfile(ROOT / name, copy / name)
    wheels = [build_wheel(tmp_path / "one"), build_wheel(tmp_path / "other", copy)]
    assert wheels[0].name == wheels[1].name
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
