"""The lines of ranks on other hosts, seen where the coordinator runs."""

import signal
import sys
from pathlib import Path

from muster.contracts.settings.paths import DataDir
from tests.support.clusters import cluster, needs_cluster
from tests.support.installation import DEADLINE_SECONDS, await_value
from tests.support.log_follower import LogFollower
from tests.support.s3_server import new_bucket, shared_store, variables

RANKS = 6
LINES = 2000
SCRIPT = f"""
import os, time
for number in range({LINES}):
    print("rank", os.environ["RANK"], "says", number, "x" * (number % 300), flush=True)
    if number % 10 == 0:
        time.sleep(0.02)
"""


def printed_by(rank: int) -> list[str]:
    return [f"rank {rank} says {number} {'x' * (number % 300)}" for number in range(LINES)]


@needs_cluster()
def test_all_lines_of_all_hosts_arrive(tmp_path: Path) -> None:
    # Ranks that do not train together need a store for what they might save.
    with cluster(tmp_path, **variables(shared_store())) as installation:
        script = tmp_path / "shared" / "printing.py"
        script.write_text(SCRIPT)
        job_id = installation.submit(
            world_size=RANKS,
            command=[sys.executable, str(script)],
            working_dir=str(script.parent),
            checkpoint_dir=str(new_bucket(shared_store())),
        )
        streamed: list[str] = []
        follower = LogFollower(installation.url, job_id, streamed.extend)
        follower.start()
        first, *others = (
            DataDir(host.directory / "data").job(job_id) for host in installation.machines
        )
        logs = [first.log(rank, 0) for rank in range(RANKS)]
        await_value(
            lambda: all(log.exists() and log.stat().st_size for log in logs),
            lambda: installation.describe(job_id),
        )
        installation.restart_coordinator(signal.SIGKILL)
        installation.complete(job_id)
        follower.wait(DEADLINE_SECONDS)
        for rank, log in enumerate(logs):
            assert log.read_text().splitlines() == printed_by(rank)
            mine = [line.partition("] ")[2] for line in streamed if f"rank {rank}]" in line]
            assert mine == printed_by(rank)
            answer = installation.request("GET", f"/jobs/{job_id}/logs?rank={rank}&tail=3").json()
            assert [line["line"] for line in answer["lines"]] == printed_by(rank)[-3:]
            assert all(line["time"] for line in answer["lines"])
        await_value(lambda: not any(it.root.exists() for it in others), lambda: f"left: {others}")
