"""Whoever may mean other services than they name is told how to name those."""

from pathlib import Path

from cli.elsewhere import of_others, unlike_here
from cli.office import Holder
from muster.processes import myself


def test_data_beside_us_that_is_not_meant_is_named(tmp_path: Path) -> None:
    assert unlike_here({}, tmp_path) is None
    (tmp_path / ".muster").mkdir()
    assert str(unlike_here({}, tmp_path)).endswith(f"export MUSTER_DATA_DIR={tmp_path}/.muster")
    assert unlike_here({"MUSTER_DATA_DIR": "/data"}, tmp_path) is None


def test_a_line_to_copy_is_quoted_and_given_for_this_machine_alone() -> None:
    here, there = "http://127.0.0.1:8000", "http://192.0.2.1:8000"
    assert of_others(here, "/data", Path("/data")) is None
    assert str(of_others(here, "/my data", Path("/data"))).endswith(
        "export MUSTER_DATA_DIR='/my data'"
    )
    for path in ("/my data", "/data", ""):
        assert str(of_others(there, path, Path("/data"))).endswith("on a machine of its own")


def test_an_up_is_found_by_each_of_its_names_and_its_own_port() -> None:
    up = Holder(
        url="https://127.0.0.1:8000",
        process=myself(),
        log=None,
        is_ending=False,
        names=("localhost", "train.example"),
    )
    assert up.is_at("https://Train.example:8000/")
    assert up.is_at("https://localhost:8000")
    for other in ("https://localhost:8001", "http://localhost:8000", "https://192.0.2.1:8000"):
        assert not up.is_at(other)
