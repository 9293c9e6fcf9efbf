"""What a shell completes, and what an editor knows about a job file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCHEMA = Path(__file__).parents[3] / "docs" / "job.schema.json"
MUSTER = Path(sys.executable).with_name("muster")

ASK = """
source <("$1" completion bash)
PATH=$(dirname "$1"):$PATH
COMP_WORDS=($2 "$3")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_muster_completion muster
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("before", "word", "offered"),
    [
        ("muster", "stat", "status"),
        ("muster", "sub", "submit"),
        ("muster token", "re", "revoke"),
        ("muster ps", "--out", "--output"),
        ("muster ps -o", "j", "json"),
        ("muster logs", "@", "@latest"),
        ("muster checkpoint diff", "@", "@latest"),
        ("muster ps --status", "r", "running recovering"),
        ("muster purge -s", "CO", "completed"),
        ("muster wait a --until", "te", "terminal"),
        ("muster submit --set", "ep", "epochs="),
    ],
)
def test_bash_completes(before: str, word: str, offered: str) -> None:
    asked = subprocess.run(
        ["/bin/bash", "--norc", "-c", ASK, "bash", str(MUSTER), before, word],
        env={**os.environ, "MUSTER_URL": "http://127.0.0.1:9"},  # no API: completion must not wait
        capture_output=True,
        text=True,
        check=False,
    )
    assert (asked.stdout, asked.stderr) == (f"{offered}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    printed = subprocess.run([MUSTER, "completion", shell], capture_output=True, check=True)
    assert b"_MUSTER_COMPLETE" in printed.stdout


def test_schema_of_a_job_file_is_current() -> None:
    printed = subprocess.run([MUSTER, "schema"], capture_output=True, text=True, check=True)
    schema = json.loads(printed.stdout)
    assert printed.stdout == SCHEMA.read_text(), "run: muster schema > docs/job.schema.json"
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False
    assert schema["properties"]["world_size"]["minimum"] == 1
