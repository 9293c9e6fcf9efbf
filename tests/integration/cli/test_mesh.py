"""`muster mesh` beside a script that waits for its household, and a secret that is typed."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from zeroconf import ServiceInfo, Zeroconf

from muster.mesh.announce import SERVICE
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


def test_announcements_of_strangers_are_text(environ: Mapping[str, str]) -> None:
    odd = {b"host": b"\xff\x1b[31m", b"protocol": None, b"node": b"9" * 200}
    texts: dict[str, dict[bytes, bytes | None]] = {"p-none": {}, "p-odd": odd}
    with closing(Zeroconf(interfaces=["127.0.0.1"])) as strangers:
        nowhere = ServiceInfo(SERVICE, f"p-nowhere.{SERVICE}", port=9, server="nowhere.local.")
        strangers.register_service(nowhere)
        for name, text in texts.items():
            own, at = f"{name}.{SERVICE}", [bytes([127, 0, 0, 9])]
            strangers.register_service(
                ServiceInfo(SERVICE, own, addresses=at, port=9, properties=text)
            )
        words = [*MUSTER, "doctor", *texts, "-o", "json"]
        checked = subprocess.run(words, env=environ, check=False, capture_output=True)
    found = {one["about"]: one for one in json.loads(checked.stdout)}
    assert (checked.returncode, checked.stderr) == (1, b"")
    assert b"\x1b" not in checked.stdout
    for name in texts:
        assert found[f"{name} heard"]["verdict"] == "ok"
        assert found[f"{name} reachable"]["seen"] == "no, 127.0.0.9: Connection refused"


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
