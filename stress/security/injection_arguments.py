"""Arguments and variables on their way to a program: they must arrive byte for byte."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.installation import Installation

ECHO = """
import json, os, sys
with open(sys.argv[1], "w") as file:
    json.dump(
        {
            "words": [os.fsencode(word).hex() for word in sys.argv[2:]],
            "variables": {
                name.decode(): value.hex()
                for name, value in os.environb.items()
                if name.startswith(b"P_")
            },
        },
        file,
    )
"""

PATIENCE_SECONDS = 60.0


def sayable(texts: Sequence[str]) -> list[str]:
    """Return those that a process can be given at all; the others are refused with the job."""
    return [
        text
        for text in texts
        if len(text) <= 4096 and "\0" not in text and text.encode(errors="replace").decode() == text
    ]


def changed_arguments(root: Path, texts: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return which texts arrived otherwise than they were sent, by the door they came through."""
    words = sayable(texts)
    variables = {f"P_{number}": word for number, word in enumerate(words)}
    script = root / "echo.py"
    script.write_text(ECHO)
    outputs = {door: root / f"{door}.json" for door in ("command", "gang", "submit", "run")}
    argv = {door: [str(script), str(output), *words] for door, output in outputs.items()}
    with Installation(root) as installation:
        environment = {**installation.environment, **variables}
        for door in ("command", "gang"):
            job_id = installation.submit(
                name=words[0],
                world_size=1,
                labels={word: word for word in words if word and word.isprintable()},
                command=[sys.executable, *argv[door]],
                env=variables,
                restart_scope="gang" if door == "gang" else "rank",
            )
            installation.complete(job_id)
        told = [word for name, text in variables.items() for word in ("-e", f"{name}={text}")]
        command = ["submit", "--id", "typed", "-n", "1", *told, "--", sys.executable]
        _muster([*command, *argv["submit"]], root, environment, installation.url)
        installation.uids["typed"] = installation.job("typed")["job_uid"]
        _muster(["run", "-n", "1", *argv["run"]], root, environment, installation.url)
    return {door: _changed(output, words, variables) for door, output in outputs.items()}


def _muster(words: Sequence[str], root: Path, environment: Mapping[str, str], url: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "cli", *words],
        cwd=root,
        env={**environment, "MUSTER_URL": url},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _changed(output: Path, words: Sequence[str], variables: Mapping[str, str]) -> Sequence[str]:
    found = json.loads(output.read_text())
    sent = [word.encode().hex() for word in words]
    changed = [word for word, here in zip(words, sent, strict=True) if here not in found["words"]]
    if found["words"] != sent:
        changed.append("all words in their order")
    for name, text in variables.items():
        if found["variables"].get(name) != text.encode().hex():
            changed.append(f"{name}={text}")
    return changed
