"""`muster mesh` beside a script that waits for its household, and a secret that is typed."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from muster.mesh.secret import make_secret
from tests.support.installation import DEADLINE_SECONDS

WAITS = f"from muster.mesh import discover; discover(2, {DEADLINE_SECONDS}, group='night')"
MUSTER = [sys.executable, "-P", "-m", "cli", "mesh"]


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    """Return the environment of another household on this machine."""
    key = {"MUSTER_CLUSTER_KEY": make_secret()}
    return {**os.environ, **key, "MUSTER_DATA_DIR": str(tmp_path / "data")}


@pytest.fixture
def waiting(environ: Mapping[str, str], tmp_path: Path) -> Iterator[None]:
    other = {**environ, "MUSTER_DATA_DIR": str(tmp_path / "other")}
    process = subprocess.Popen([sys.executable, "-c", WAITS], env=other)
    yield
    process.kill()
    process.wait()


@pytest.mark.usefixtures("waiting")
def test_a_script_that_waits_answers_and_passes(environ: Mapping[str, str]) -> None:
    rows: list[dict[str, Any]] = []
    while not rows:  # until the script has been started
        listed = subprocess.run(
            [*MUSTER, "-o", "json"], env=environ, check=True, capture_output=True
        )
        rows = json.loads(listed.stdout)
    (row,) = rows
    assert (row["group"], row["size"]) == ("night", 3)
    process_id = str(row["process_id"])
    checked = subprocess.run(
        [*MUSTER, "doctor", process_id, "-o", "json"], env=environ, check=False, capture_output=True
    )
    found = {one["about"]: one for one in json.loads(checked.stdout)}
    assert checked.returncode == 0, found
    assert str(row["node_id"]) in found[f"{process_id} heard"]["seen"]
    assert found[f"{process_id} reachable"]["seen"] == "{}:{}".format(*row["address"])
    assert found[f"{process_id} trusted"]["seen"] == "same protocol, cluster and secret"


def test_a_typed_secret_is_not_shown(environ: Mapping[str, str], tmp_path: Path) -> None:
    text, (master, slave) = make_secret(), pty.openpty()
    process = subprocess.Popen(
        [*MUSTER, "join"],
        env=environ,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    shown = b""
    while b"it is not shown" not in shown:
        shown += os.read(master, 4096)
    os.write(master, f"{text}\n".encode())
    try:
        while data := os.read(master, 4096):
            shown += data
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(master)
    assert process.wait(DEADLINE_SECONDS) == 0, shown
    assert text.encode() not in shown
    assert (tmp_path / "data" / "cluster.key").read_text().strip() == text
