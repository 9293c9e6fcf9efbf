"""`muster run --peers`: what a run is called, and which scripts differ."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.jobs.peers import difference, group_of
from cli.main import app
from muster.contracts.settings.paths import DataDir


@pytest.mark.parametrize(
    ("word", "group"),
    [
        ("train.py", "train"),
        ("../my code/Train_2.py", "Train_2"),
        ("my.train.v2.py", "my-train-v2"),
        ("übung.py", "bung"),
        ("..", "run"),
        ("x" * 40, "x" * 32),
    ],
)
def test_a_run_is_called_after_its_script(word: str, group: str) -> None:
    assert group_of(word) == group
    assert group_of(group) == group


def test_each_machine_with_another_script_is_named() -> None:
    assert difference("a1", [("desk", "a1"), ("attic", "a1")]) == ""
    assert difference("a1", [("desk", "b2"), ("desk", "a1")]) == "a1 here, b2 on desk"


@pytest.mark.parametrize("words", [["--peers", "2"], ["--elastic", "--group", "night"]])
def test_peers_and_group_need_what_they_belong_to(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["run", *words, "true"])
    assert (done.exit_code, "--peers needs --elastic" in done.output) == (2, True), done.output


def test_a_run_has_key_and_secret_of_its_installation(tmp_path: Path) -> None:
    files = DataDir(tmp_path).foreground("peers.train")
    assert files.node_key == tmp_path / "node.key"
    assert files.cluster_key == tmp_path / "cluster.key"
