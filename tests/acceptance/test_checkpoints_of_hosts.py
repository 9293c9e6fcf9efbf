"""Hosts that share no directory save on the coordinator's host, whatever dies meanwhile."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster.checkpoints.comparison import identity_of
from muster.checkpoints.listing import checkpoint_dirs
from tests.support.clusters import ClusterInstallation, cluster, needs_cluster
from tests.support.installation import Seen, is_running

pytestmark = [needs_cluster(), pytest.mark.timeout(300)]

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "examples" / "aware.py")]
JOB = {"world_size": 4, "sleep_sec": 0.02, "hosts": ["host-1", "host-2"], "seed": 3}
JOBS = {
    "synchronous": {**JOB, "mode": "synchronous", "epochs": 60, "virtual_shards": 8},
    "independent": {**JOB, "epochs": 60, "checkpoint_every": 5},
    # Ranks of this example do not wait for each other, so on a busy machine some fall behind.
    "gang": {**JOB, "epochs": 30, "command": COMMAND, "restart_scope": "gang", "keep_last": 100},
}


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInstallation]:
    with cluster(tmp_path_factory.mktemp("cluster")) as installation:
        yield installation


PARAMETERS = [
    pytest.param(fields, id=name, marks=pytest.mark.long if name == "gang" else ())
    for name, fields in JOBS.items()
]


def kill(installation: ClusterInstallation, number: int, kind: str) -> None:
    """Kill a process of a job on a host: the first whose tag begins so."""
    tags = installation.process_tags(installation.machines[number])
    os.kill(next(pid for pid, tag in tags.items() if tag.startswith(kind)), signal.SIGKILL)


def saves_after(seen: Seen | None) -> Callable[[Seen], bool]:
    before = 0 if seen is None else seen["checkpoints_saved"]
    return lambda now: is_running(now) and now["checkpoints_saved"] >= before + 4


@pytest.mark.parametrize("fields", PARAMETERS)
def test_checkpoints_reach_the_coordinator(
    installation: ClusterInstallation, fields: dict[str, object]
) -> None:
    job_id = installation.submit(**fields)
    seen = installation.wait_until(job_id, saves_after(None))
    rank = next(it["rank"] for it in seen["workers"] if it["node"] == "host-1")
    for number, kind in (1, f"{rank}/"), (1, "storage"), (2, "storage"), (2, "agent"):
        kill(installation, number, kind)
        seen = installation.wait_until(job_id, saves_after(seen))
    installation.restart_coordinator(signal.SIGKILL)
    installation.wait_until(job_id, saves_after(seen))
    installation.complete(job_id)
    undisturbed = installation.submit(**{**fields, "sleep_sec": 0})
    installation.complete(undisturbed)
    first, second = (
        [identity_of(it.newest()) for it in checkpoint_dirs(installation.checkpoint_dir / each)]
        for each in (job_id, undisturbed)
    )
    assert first == second
    assert installation.kinds(job_id).count("checkpoints_sent") >= 2
    for machine in installation.machines[1:]:
        assert not (machine.directory / "checkpoints").exists()
