"""A command that cannot run is doubted before it is tried."""

from pathlib import Path

import pytest

from api.runnable import doubts

SEARCH_PATH = "/usr/bin:/bin"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").touch(mode=0o644)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/go").touch(mode=0o755)
    (tmp_path / "bin/python3").touch(mode=0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["pyhton", "loop.py"], "command: pyhton is not found in PATH"),
        (["loop.py"], "command: loop.py is not found in PATH: run it with python, or as ./loop.py"),
        (["./loop.py"], "command: ./loop.py is not executable: "),
        (["./nope"], "command: there is no ./nope in "),
        (["bin/python3", "nope.py"], "command: there is no nope.py in "),
        (["python loop.py"], "command: 'python loop.py' is one word: "),
        (["\x1b[31mgo"], r"command: \x1b[31mgo is not found in PATH"),
        (["bin/python3", "\x9d0;x\x07.py"], r"command: there is no \x9d0;x\x07.py in "),
    ],
)
def test_what_cannot_run_is_doubted(here: Path, command: list[str], said: str) -> None:
    (doubt,) = doubts(command, here, SEARCH_PATH)
    assert doubt.startswith(said)


@pytest.mark.parametrize(
    "command",
    [
        ["bin/go", "nope.py"],
        ["sh", "-c", "exit"],
        ["bin/python3", "loop.py"],
        ["bin/python3", "-m", "x.py"],
        ["bin/python3"],
        ["bin/python3", "x" * 300 + ".py"],
    ],
)
def test_what_can_run_is_not(here: Path, command: list[str]) -> None:
    assert list(doubts(command, here, SEARCH_PATH)) == []
