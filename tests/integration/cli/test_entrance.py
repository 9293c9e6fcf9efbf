"""Ctrl-C at any moment is an end and no story; a closed stream is no reason to do nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BEFORE_ALL_ELSE = """
import signal, sys
class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Impatient())
sys.argv = ["muster", "ps"]
from cli.entrance import main
main()
"""


def test_an_interruption_while_it_is_still_being_loaded_is_quiet() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BEFORE_ALL_ELSE], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_who_is_started_without_standard_streams_works_all_the_same(
    closed: str, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    command = f'"$0" -P -m cli run -n 1 touch {done} {closed}'
    ended = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable],
        env={**os.environ, "MUSTER_DATA_DIR": str(tmp_path / "data")},
        check=False,
    )
    assert ended.returncode == 0
    assert done.exists()


def test_a_terminal_without_utf_8_gets_every_word() -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "cli", "config", "show", "-o", "json"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "CHECKPOINT_DIR": "/größe…"},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert r'"/größe\u2026"'.encode("latin-1") in ended.stdout
