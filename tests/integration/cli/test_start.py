"""``muster`` starts quickly, and on any terminal."""

import os
import subprocess
import sys

import pytest

HEAVY = ["fastapi", "httpx", "msgspec", "numpy", "pydantic", "rich.console", "sqlalchemy"]

PROBE = f"""
import sys
from cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("imported:", *(name for name in {HEAVY!r} if name in sys.modules))
"""


def imported(*words: str) -> list[str]:
    """Return the heavy modules that a command has imported at its end."""
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["version"], ["completion", "bash"]], ids=" ".join
)
def test_small_command_imports_nothing_heavy(words: list[str]) -> None:
    assert not imported(*words)


@pytest.mark.parametrize("verb", ["ps", "submit", "checkpoint", "wait"])
def test_help_of_a_verb_imports_only_msgspec(verb: str) -> None:
    assert set(imported(verb, "--help")) <= {"msgspec"}


def test_terminal_without_utf_8_shows_escapes() -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "cli", "config", "show", "-o", "json"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "CHECKPOINT_DIR": "/größe…"},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert r'"/größe\u2026"'.encode("latin-1") in ended.stdout
