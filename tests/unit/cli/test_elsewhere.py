"""Whoever may mean other services than they name is told how to name those."""

from pathlib import Path

from cli.elsewhere import of_others, unlike_here


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
    assert "export" not in str(of_others(there, "/my data", Path("/data")))
