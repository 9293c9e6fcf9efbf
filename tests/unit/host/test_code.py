"""Which files are the code of a job, and which of them a process has loaded."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.host import code
from muster.host.code import copy_code, digest_of, read_code, script_of


def make(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)


@pytest.mark.parametrize(
    ("command", "file", "root"),
    [
        ("python train.py --data x.py", "train.py", ""),
        ("python -u -W ignore app/train.py", "app/train.py", "app"),
        ("python -m app.train x", "app/train.py", ""),
        ("python -m app", "app/__main__.py", ""),
        ("torchrun --nproc-per-node 2 app/train.py", "app/train.py", "app"),
        ("python -m torch.distributed.run train.py", "train.py", ""),
        ("bash run", "run", ""),
        ("./run.sh", "run.sh", ""),
    ],
)
def test_the_script_of_a_command(tmp_path: Path, command: str, file: str, root: str) -> None:
    make(tmp_path, "train.py", "app/train.py", "app/__main__.py", "run", "run.sh")
    found = script_of(command.split(), None, tmp_path)
    assert found is not None
    assert found[:2] == (str(tmp_path / file), os.path.realpath(tmp_path / root))


@pytest.mark.parametrize("command", ["sleep 9", "python -c train.py", "python other.py", "python"])
def test_a_command_without_a_script(tmp_path: Path, command: str) -> None:
    make(tmp_path, "train.py")
    assert script_of(command.split(), None, tmp_path) is None


@pytest.mark.parametrize(
    ("program", "file"), [("train.py:Model", "train.py"), ("app.train:Model", "app/train.py")]
)
def test_the_file_of_a_program(tmp_path: Path, program: str, file: str) -> None:
    make(tmp_path, "train.py", "app/train.py")
    found = script_of(None, program, tmp_path)
    assert found is not None
    assert found.file == str(tmp_path / file)


def test_the_code_of_a_job_leaves_out_caches_environments_and_data(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "app/layer.py", "notes.txt", ".git/hook.py", "app/__pycache__/x.py")
    make(tmp_path, "env/pyvenv.cfg", "env/lib/x.py", "runs/LATEST", "runs/x.py")
    make(tmp_path, "lib/site-packages/x.py")
    files = read_code(script_of(["python", "train.py"], None, tmp_path))
    assert {os.path.relpath(it, tmp_path) for it in files} == {"train.py", "app/layer.py"}
    assert files[str(tmp_path / "train.py")] == hashlib.sha256(b"train.py").hexdigest()[:16]


def test_a_file_that_goes_while_code_is_read_is_left_out(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "layer.py")
    script = script_of(["python", "train.py"], None, tmp_path)
    (tmp_path / "train.py").unlink()
    assert [*read_code(script)] == [str(tmp_path / "layer.py")]


def test_the_code_of_a_job_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "train.py", *(f"{number}.py" for number in range(9)))
    script = script_of(["python", "train.py"], None, tmp_path)
    monkeypatch.setattr(code, "FILES_LIMIT", 4)
    assert len(read_code(script)) == 4
    monkeypatch.setattr(code, "BYTES_LIMIT", 12)
    assert len(read_code(script)) == 2


def test_a_process_reports_what_it_has_loaded_once(tmp_path: Path) -> None:
    make(tmp_path, "elsewhere/package.py", "lib/site-packages/installed.py", "layer.py", "later.py")
    for name in tmp_path.rglob("*.py"):
        name.write_text("")
    (tmp_path / "train.py").write_text(
        "import json, os, sys\n"
        "sys.path += ['elsewhere', 'lib/site-packages']\n"
        "import layer, package, installed\n"
        "from muster.host.code import LoadedCode\n"
        "loaded = LoadedCode()\n"
        "print(json.dumps(loaded.fresh()))\n"
        "import later, wave\n"
        "print(json.dumps(loaded.fresh()), loaded.fresh())\n"
    )
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    first, second = ran.stdout.splitlines()
    for name in ("train.py", "layer.py", "elsewhere/package.py"):
        assert f'"{tmp_path / name}": "{digest_of(str(tmp_path / name))}"' in first
    assert first.count(".py") == 3
    assert (
        second == f'{{"{tmp_path / "later.py"}": "{digest_of(str(tmp_path / "later.py"))}"}} {{}}'
    )


def test_a_copy_keeps_links_to_directories(tmp_path: Path) -> None:
    make(tmp_path, "shared/layer.py", "job/train.py", "job/.git/x", "job/runs/LATEST")
    (tmp_path / "job" / "shared").symlink_to("../shared")
    (tmp_path / "job" / "gone").symlink_to("nowhere")
    copy_code(str(tmp_path / "job"), tmp_path / "copy")
    assert {it.name for it in (tmp_path / "copy").iterdir()} == {"train.py", "shared"}
    assert (tmp_path / "copy" / "shared" / "layer.py").read_text() == "shared/layer.py"
