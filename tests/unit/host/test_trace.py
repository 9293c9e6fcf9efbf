"""The trace of moments."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

STAMP = "from muster.host.trace import stamp; stamp('began', rank=3)"


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 2])
def test_each_process_appends_its_stamps(tmp_path: Path, count: int) -> None:
    file = tmp_path / "trace"
    environ = os.environ | {
        "MUSTER_PROCESS_TAG": "uid/3/0  ",
        "MUSTER_TRACE": str(file) if count else "",
    }
    for _ in range(2):
        subprocess.run([sys.executable, "-c", STAMP], env=environ, check=True)
    lines = file.read_bytes().splitlines() if file.exists() else []
    found = [msgspec.json.decode(line) for line in lines]
    assert [(it["event"], it["tag"], it["rank"]) for it in found] == [
        ("began", "uid/3/0", 3)
    ] * count
