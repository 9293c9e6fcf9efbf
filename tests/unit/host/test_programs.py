"""Commands that cannot be started are recognized, and no others; Pythons may be scripts."""

import os
import sys
from pathlib import Path

import pytest

from muster.contracts.interpreter import PROTOCOL, VERSION
from muster.host.programs import (
    callers_python,
    command_problem,
    interpreter_problem,
    with_interpreter,
)

SEARCH_PATH = "/usr/bin:/bin"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").touch(mode=0o644)
    (tmp_path / "go.py").touch(mode=0o755)
    _executable(tmp_path / "windows.sh", "#!/bin/sh\r\nexit\r\n")
    _executable(tmp_path / "plain.sh", "exit\n")
    (tmp_path / "run.sh").touch(mode=0o644)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/go").touch(mode=0o755)
    (tmp_path / "bin/python3").touch(mode=0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["pyhton", "loop.py"], "pyhton is not found in PATH"),
        (["loop.py", "--lr", "1"], "but not in PATH: write python loop.py --lr 1"),
        (["go.py"], "but not in PATH: write ./go.py"),
        (["./loop.py"], "./loop.py is not executable: run chmod +x on it, or run it with python"),
        (["run.sh", "2"], "but not in PATH: write bash run.sh 2"),
        (["./run.sh"], "./run.sh is not executable: run chmod +x on it, or run it with bash"),
        (["./nope"], "there is no ./nope in "),
        (["bin/python3", "nope.py"], "there is no nope.py in "),
        (["bin/python3", "-u", "nope.py"], "there is no nope.py in "),
        (["sh", "-x", "nope.sh"], "there is no nope.sh in "),
        (["./windows.sh"], "./windows.sh has Windows line ends: run sed -i 's/\\r$//' "),
        (["./plain.sh"], "./plain.sh has no first line such as #!/bin/sh: add one"),
        (["cd .. && python a.py"], "or write sh -c 'cd .. && python a.py'"),
        (["\x1b[31mgo"], r"\x1b[31mgo is not found in PATH"),
        (["bin/python3", "\x9d0;x\x07.py"], r"there is no \x9d0;x\x07.py in "),
    ],
)
def test_command_that_cannot_run_says_why(directory: Path, command: list[str], said: str) -> None:
    assert said in (command_problem(command, directory, SEARCH_PATH) or "")


@pytest.mark.parametrize(
    "command",
    [
        ["bin/go", "nope.py"],
        ["sh", "-c", "exit"],
        ["sh", "-lc", "cd .. && python nope.py"],
        ["sh", "plain.sh"],
        ["/bin/sh"],
        ["bin/python3", "-u", "loop.py"],
        ["bin/python3", "-m", "x.py"],
        ["bin/python3"],
        ["bin/python3", "x" * 300 + ".py"],
    ],
)
def test_command_that_can_run_has_no_problem(directory: Path, command: list[str]) -> None:
    assert command_problem(command, directory, SEARCH_PATH) is None


@pytest.mark.parametrize(
    ("program", "python", "job_env", "means"),
    [
        ("python", None, {}, sys.executable),
        ("python3", None, {"X": "1"}, sys.executable),
        ("python", None, {"PATH": "/venv/bin"}, "python"),
        ("python", "/my/python", {"PATH": "/venv/bin"}, "/my/python"),
        ("python3.11", "/my/python", {}, "python3.11"),
        ("/usr/bin/python", None, {}, "/usr/bin/python"),
    ],
)
def test_python_in_a_command_is_that_of_the_job_or_ours(
    program: str, python: str | None, job_env: dict[str, str], means: str
) -> None:
    assert with_interpreter([program, "a.py"], python, job_env) == [means, "a.py"]


@pytest.mark.parametrize(
    ("says", "chosen"),
    [
        ("printf '\\377 activated\\n'; echo /bin/sh", "/bin/sh"),
        ("echo no version is set; exit 1", sys.executable),
        ("echo choose a version", sys.executable),
    ],
)
def test_python_that_is_a_script_names_the_one_it_chooses(
    tmp_path: Path, says: str, chosen: str
) -> None:
    _script(tmp_path / "python", says)
    assert callers_python({"PATH": f"{tmp_path}:/usr/bin:/bin"}) == chosen


def test_interpreter_that_prints_other_bytes_first_is_understood(tmp_path: Path) -> None:
    python = _script(tmp_path / "python", f"printf '\\377\\n'; echo {VERSION} {PROTOCOL}")
    assert interpreter_problem(str(python), os.environ) is None


def _script(path: Path, text: str) -> Path:
    return _executable(path, f"#!/bin/sh\n{text}\n")


def _executable(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    path.chmod(0o755)
    return path


def test_interpreter_that_hangs_is_an_error_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.host.programs.ANSWER_SECONDS", 0.1)
    python = _script(tmp_path / "python", "exec sleep 60")
    with pytest.raises(TimeoutError, match="has not told its version"):
        interpreter_problem(str(python), os.environ)
