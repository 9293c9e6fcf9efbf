"""From the words of a command line to a job."""

import sys
from pathlib import Path

import pytest
from typer import BadParameter
from typer.testing import CliRunner

from cli.__main__ import app
from cli.run import (
    as_torchrun_spells_it,
    command_of,
    module_of,
    new_id,
    ranks_named,
    set_by_caller,
)
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


def test_a_module_is_run_by_this_python(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    words = ["package.train", "-m", "3"]
    assert module_of(words, tmp_path) == (sys.executable, "-m", *words)
    assert module_of(["json.tool"], tmp_path) == (sys.executable, "-m", "json.tool")
    assert "package" not in sys.modules


def test_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="there is no module nope in"):
        module_of(["nope.train"], tmp_path)


@pytest.mark.parametrize("word", ["4", "cpu", "auto"])
def test_a_number_of_ranks_may_be_a_word_of_torchruns(word: str) -> None:
    assert ranks_named(word) >= 1


def test_a_rank_for_each_gpu_is_one_for_each_that_a_rank_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cli.run.visible_gpus", lambda _: 2)
    assert (ranks_named("gpu"), ranks_named("auto")) == (2, 2)
    monkeypatch.setattr("cli.run.visible_gpus", lambda _: 0)
    with pytest.raises(BadParameter, match="there is no GPU here"):
        ranks_named("gpu")
    assert ranks_named("auto") == ranks_named("cpu")


@pytest.mark.parametrize("word", ["0", "-1", "many"])
def test_what_is_no_number_of_ranks_is_refused(word: str) -> None:
    with pytest.raises(BadParameter, match="is no number of ranks"):
        ranks_named(word)


def test_what_torchrun_needs_for_several_machines_has_no_effect_on_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--rdzv_backend=c10d", "--rdzv-endpoint", "localhost:0", "--node_rank", "0"]
    refused = CliRunner().invoke(app, ["run", *options, "--tee", "3", "nowhere.py"])
    assert "there is no script nowhere.py" in refused.output  # so the options were taken


def test_options_may_be_spelt_as_torchrun_spells_them() -> None:
    assert as_torchrun_spells_it("--nproc_per_node") == "--nproc-per-node"


def test_ranks_of_several_machines_are_refused_and_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "data"))
    refused = CliRunner().invoke(app, ["run", "--nnodes", "2", "--max_restarts", "0", "true"])
    assert (refused.exit_code, "on this machine alone" in refused.output) == (2, True)
    assert not (tmp_path / "data").exists()


def test_what_the_caller_has_set_holds_where_there_is_a_default() -> None:
    environ = {"OMP_NUM_THREADS": "8", "PYTHONUNBUFFERED": "", "RANK": "7", "HOME": "/home"}
    assert set_by_caller(environ) == {"OMP_NUM_THREADS": "8", "PYTHONUNBUFFERED": ""}


def test_an_id_that_nobody_chose_is_an_id_and_another_each_time() -> None:
    first, second = new_id(), new_id()
    assert checked_job_id(first) == first != second
