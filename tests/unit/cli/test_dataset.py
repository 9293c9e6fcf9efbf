import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cli import dataset


def muster(*words: str) -> Result:
    app = typer.Typer()
    app.add_typer(dataset.app, name="dataset")
    return CliRunner().invoke(app, ["dataset", *words])


@pytest.mark.slow
def test_digits_are_written_and_the_next_command_is_said(tmp_path: Path) -> None:
    out = tmp_path / "my digits"
    result = muster("digits", "--out", str(out), "--shards", "3")
    assert result.exit_code == 0
    assert result.stdout == (
        f"Wrote 1438 samples in 3 shards to {out}, 359 more in test.jsonl. "
        f"Next: muster submit -n 2 --set dataset_dir='{out}'\n"
    )
    assert result.stderr == ""
    assert len(list(out.glob("shard_*.txt"))) == 3


def test_synthetic_samples_are_written(tmp_path: Path) -> None:
    result = muster("synthetic", "--out", str(tmp_path), "--samples", "20000", "--shards", "2")
    assert result.exit_code == 0
    assert "Wrote 20000 samples in 2 shards" in result.stdout
    assert result.stderr == "", "no progress where there is no terminal"


def test_progress_is_told_on_a_terminal_and_not_mixed_with_the_answer(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", "from cli.dataset import app; app()", "synthetic"]
    try:
        done = subprocess.run(
            [*command, "--out", str(tmp_path), "--samples", "10001"],
            stdout=subprocess.PIPE,
            stderr=theirs,
            check=True,
            timeout=60,
        )
        told = os.read(ours, 1000)
    finally:
        os.close(ours)
        os.close(theirs)
    assert told == b"\r10000 of 10001 samples\r10001 of 10001 samples\r\n"
    assert done.stdout.startswith(b"Wrote 10001 samples")


def test_what_is_there_stays_unless_it_is_forced(tmp_path: Path) -> None:
    first = ("synthetic", "--out", str(tmp_path), "--shards", "4")
    assert muster(*first).exit_code == 0
    refused = muster(*first)
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith(f"muster: cannot write to {tmp_path}: it already holds shards")
    assert refused.stderr.count("\n") == 1
    assert muster("synthetic", "--out", str(tmp_path), "--shards", "2", "--force").exit_code == 0
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
def test_a_number_out_of_range_is_refused_with_the_options_name(
    tmp_path: Path, option: str, value: str
) -> None:
    out = tmp_path / "out"
    result = muster("synthetic", "--out", str(out), option, value)
    assert result.exit_code == 2
    assert option in result.stderr
    assert not out.exists()


def test_without_a_directory_the_usage_is_explained() -> None:
    result = muster("digits")
    assert result.exit_code == 2
    assert "--out" in result.stderr


def test_help_imports_nothing_that_is_slow() -> None:
    script = (
        "import sys, cli.dataset; print(sorted({'numpy', 'sklearn', 'msgspec', 'xxhash',"
        " 'muster.datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
