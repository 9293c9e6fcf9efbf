"""A command that needs little brings in little: help answers at once."""

import subprocess
import sys

import pytest

HEAVY = ["fastapi", "httpx", "numpy", "sqlalchemy", "yaml"]

PROBE = f"""
import sys
from cli.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("brought in:", *(name for name in {HEAVY!r} if name in sys.modules))
"""


@pytest.mark.parametrize("words", [["--help"], ["submit", "--help"], ["--version"]], ids=" ".join)
def test_help_brings_in_nothing_heavy(words: list[str]) -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[-1] == "brought in:"
