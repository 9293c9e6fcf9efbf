"""Commands that cannot be started are recognized, and no others."""

from pathlib import Path

import pytest

from muster.host.programs import command_problem

SEARCH_PATH = "/usr/bin:/bin"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").touch(mode=0o644)
    (tmp_path / "go.py").touch(mode=0o755)
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
        (["./loop.py"], "./loop.py is not executable: "),
        (["./nope"], "there is no ./nope in "),
        (["bin/python3", "nope.py"], "there is no nope.py in "),
        (["bin/python3", "-u", "nope.py"], "there is no nope.py in "),
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
        ["bin/python3", "-u", "loop.py"],
        ["bin/python3", "-m", "x.py"],
        ["bin/python3"],
        ["bin/python3", "x" * 300 + ".py"],
    ],
)
def test_command_that_can_run_has_no_problem(directory: Path, command: list[str]) -> None:
    assert command_problem(command, directory, SEARCH_PATH) is None
