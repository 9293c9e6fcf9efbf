"""Ctrl-C at any moment is an end and no story."""

import signal
import subprocess
import sys

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
