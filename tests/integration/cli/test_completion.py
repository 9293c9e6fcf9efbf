"""What a shell is told when somebody presses Tab, and what an editor is told of a job file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.completion import fields

COMMITTED = Path(__file__).parents[3] / "docs" / "job.schema.json"
"""For the examples and for whoever has no Muster at hand."""

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
        ("muster purge -s", "CO", "COMPLETED"),
        ("muster wait a --until", "te", "terminal"),
        ("muster submit --set", "ep", "epochs="),
    ],
)
def test_bash_completes(before: str, word: str, offered: str) -> None:
    asked = subprocess.run(
        ["/bin/bash", "--norc", "-c", ASK, "bash", str(MUSTER), before, word],
        env={**os.environ, "MUSTER_URL": "http://127.0.0.1:9"},  # nobody is there to be asked
        capture_output=True,
        text=True,
        check=False,
    )
    assert (asked.stdout, asked.stderr) == (f"{offered}\n", "")


def test_every_field_of_a_job_file_is_offered() -> None:
    described = json.loads(COMMITTED.read_text())["properties"]
    assert {f"{name}=" for name in described} == set(fields(""))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str) -> None:
    said = subprocess.run([MUSTER, "completion", shell], capture_output=True, text=True, check=True)
    assert "_MUSTER_COMPLETE" in said.stdout


def test_the_schema_of_a_job_file_knows_the_fields_and_no_others() -> None:
    said = subprocess.run([MUSTER, "schema"], capture_output=True, text=True, check=True)
    schema = json.loads(said.stdout)
    assert said.stdout == COMMITTED.read_text(), "muster schema > docs/job.schema.json"
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False
    assert schema["properties"]["world_size"]["minimum"] == 1
