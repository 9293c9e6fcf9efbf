"""Paths of a job that was typed on another node."""

from pathlib import Path

import pytest

from api.submission import at_home
from muster.contracts.job.spec import JobRequest
from muster.contracts.relay import RelayedClient

BEN = RelayedClient(node_id="n-1", host="laptop", user="uid:1000", home="/home/ben")


def test_paths_below_another_home_are_below_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    asked = JobRequest(
        command=("/home/ben/venv/bin/python", "/home/ben/train.py", "--out=/home/ben"),
        working_dir="/home/ben",
        dataset_dir="/data/ben",
        python="/home/benno/bin/python",
    )
    here = at_home(asked, BEN)
    assert here.command == ("/home/anna/venv/bin/python", "/home/anna/train.py", "--out=/home/ben")
    assert (here.working_dir, here.dataset_dir) == ("/home/anna", "/data/ben")
    assert here.python == "/home/benno/bin/python"


@pytest.mark.parametrize("user", [None, 1000, RelayedClient(node_id="n", host="h", user=None)])
def test_others_keep_their_paths(user: RelayedClient | int | None) -> None:
    asked = JobRequest(working_dir=str(Path.home() / "x"), command=("python",))
    assert at_home(asked, user) is asked
