"""A command that needs little brings in little: help answers at once."""

import subprocess
import sys

import pytest

HEAVY = ["fastapi", "httpx", "msgspec", "numpy", "pydantic", "rich", "sqlalchemy", "yaml"]

PROBE = f"""
import sys
from cli.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("brought in:", *(name for name in {HEAVY!r} if name in sys.modules))
"""


def brought_in(*words: str) -> list[str]:
    """Return which heavy modules a command has imported at its end."""
    said = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    return said.stdout.splitlines()[-1].split()[2:]


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["version"], ["ps", "--help"]], ids=" ".join
)
def test_help_brings_in_nothing_heavy(words: list[str]) -> None:
    assert not brought_in(*words)


def test_plain_words_are_read_without_pydantic() -> None:
    assert not brought_in("completion", "bash")


def test_help_on_what_ends_with_a_job_needs_no_http() -> None:
    """It needs to know errors by their names, and their documents are msgspec's."""
    assert brought_in("submit", "--help") == ["msgspec"]
