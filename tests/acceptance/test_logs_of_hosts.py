"""The lines of ranks on other hosts, seen where the coordinator runs."""

import re
import signal
import sys
from pathlib import Path

import pytest

from muster.contracts.paths import DataDir
from tests.support.clusters import cluster, needs_cluster
from tests.support.installation import await_value

LINES = 3000
SCRIPT = f"""
import os, time
rank = os.environ["RANK"]
for number in range({LINES}):
    print(f"rank {{rank}} says", number, "x" * (number % 300), flush=True)
    if number % 10 == 0:
        time.sleep(0.02)
"""


def printed_by(rank: int) -> str:
    return "".join(f"rank {rank} says {n} {'x' * (n % 300)}\n" for n in range(LINES))


@needs_cluster()
@pytest.mark.timeout(120)
def test_all_lines_of_all_hosts_are_at_home(tmp_path: Path) -> None:
    with cluster(tmp_path, count=3, slots=2) as installation:
        script = tmp_path / "shared" / "printing.py"
        script.write_text(SCRIPT)
        command = [sys.executable, str(script)]
        job_id = installation.submit(world_size=6, command=command, working_dir=str(tmp_path))
        home, *others = (
            DataDir(host.directory / "data").job(job_id) for host in installation.machines
        )
        logs = [home.log(rank, 0) for rank in range(6)]
        await_value(
            lambda: all(it.exists() and it.stat().st_size > 4096 for it in logs),
            lambda: installation.describe(job_id),
        )
        installation.restart_coordinator(signal.SIGKILL)
        with installation.stream(job_id) as stream:
            streamed = "".join(stream)
        assert installation.see(job_id)["status"] == "COMPLETED"
        for rank, log in enumerate(logs):
            assert log.read_text() == printed_by(rank)
            assert len(re.findall(rf"rank {rank} says \d+ ", streamed)) >= 1
            answer = installation.request("GET", f"/jobs/{job_id}/logs?rank={rank}&tail=5").json()
            assert [line["line"] for line in answer["lines"]] == printed_by(rank).splitlines()[-5:]
            assert all(line["time"] for line in answer["lines"])
        await_value(lambda: not any(it.root.exists() for it in others), lambda: f"left: {others}")
