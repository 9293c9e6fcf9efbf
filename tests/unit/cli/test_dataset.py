"""Data sets are written whole, reported, and never replaced by accident."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.main import app


def dataset(*words: str) -> Result:
    return CliRunner().invoke(app, ["dataset", *words])


@pytest.mark.slow
def test_digits_are_written_and_the_next_command_named(tmp_path: Path) -> None:
    out = tmp_path / "my digits"
    result = dataset("digits", "--out", str(out), "--shards", "3")
    assert result.exit_code == 0
    assert result.stdout == (
        f"Wrote 1438 samples in 3 shards to {out}, 359 more in test.jsonl. "
        f"Next: muster submit -n 2 --set dataset_dir='{out}'\n"
    )
    assert result.stderr == ""
    assert len(list(out.glob("shard_*.txt"))) == 3


def test_home_is_expanded_where_the_shell_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert dataset("synthetic", "--samples=8", "--shards=1", "--out=~/x").exit_code == 0
    assert [it.name for it in tmp_path.iterdir()] == ["x"]
    refused = dataset("synthetic", "--out=~no-one/x")
    assert refused.exit_code == 2
    assert "'~no-one/x' names the home of an unknown user" in refused.stderr


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    words = ["synthetic", "--samples", "10001", "--out"]
    quiet = dataset(*words, str(tmp_path / "quiet"))
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "cli", "dataset", *words, str(tmp_path / "shown")],
            stdout=subprocess.PIPE,
            stderr=theirs,
            check=True,
            timeout=60,
        )
        shown = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"100%" in shown
    assert done.stdout.startswith(b"Wrote 10001 samples")


def test_existing_data_is_replaced_only_with_force(tmp_path: Path) -> None:
    first = ("synthetic", "--out", str(tmp_path), "--shards", "4")
    assert dataset(*first).exit_code == 0
    refused = dataset(*first)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"muster: cannot write to {tmp_path}: it already holds shards")
    assert refused.stderr.count("\n") == 1
    assert len(list(tmp_path.glob("shard_*.txt"))) == 4
    kept = dataset(*first, "--if-missing")
    assert (kept.exit_code, kept.stdout) == (
        0,
        f"{tmp_path} holds a data set already: nothing was written\n",
    )
    assert dataset("synthetic", "--out", str(tmp_path), "--shards", "2", "--force").exit_code == 0
    assert len(list(tmp_path.glob("shard_*.txt"))) == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--shards", "0"),
        ("--shards", "100000"),
        ("--shards", "2049"),
        ("--samples", "0"),
        ("--samples", "many"),
        ("--features", "0"),
        ("--classes", "1"),
        ("--seed", "-1"),
    ],
)
def test_number_out_of_range_is_refused_by_option(tmp_path: Path, option: str, value: str) -> None:
    out = tmp_path / "out"
    result = dataset("synthetic", "--out", str(out), option, value)
    assert result.exit_code == 2
    assert option in result.stderr
    assert not out.exists()
