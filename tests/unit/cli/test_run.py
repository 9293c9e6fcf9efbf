"""From the words of a command line to a job."""

import sys
from pathlib import Path

import pytest
from typer import BadParameter

from cli.run import command_of, new_id, set_by_caller
from muster.contracts.spec_problems import checked_job_id


def test_a_script_is_run_by_this_python_and_anything_else_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["train.py", "--lr", "-n", "3"]
    assert command_of(words, tmp_path) == (sys.executable, *words)
    assert command_of([str(tmp_path / "train.py")], Path("/"))[0] == sys.executable
    assert command_of(["bash", "train.sh"], tmp_path) == ("bash", "train.sh")


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=r"there is no script train\.py in"):
        command_of(["train.py"], tmp_path)


def test_what_the_caller_has_set_holds_where_there_is_a_default() -> None:
    environ = {"OMP_NUM_THREADS": "8", "PYTHONUNBUFFERED": "", "RANK": "7", "HOME": "/home"}
    assert set_by_caller(environ) == {"OMP_NUM_THREADS": "8", "PYTHONUNBUFFERED": ""}


def test_an_id_that_nobody_chose_is_an_id_and_another_each_time() -> None:
    first, second = new_id(), new_id()
    assert checked_job_id(first) == first != second
