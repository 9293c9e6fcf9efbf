"""Jobs over nodes of a household: one machine leads, and has others start agents over links."""

from pathlib import Path

import pytest

from muster.host.processes import environment_of
from muster.mesh.secret import KEY_VARIABLE
from tests.support.clusters import SIX_RANKS, needs_cluster
from tests.support.households import home_cluster

pytestmark = [needs_cluster(), pytest.mark.timeout(180)]


def test_a_job_runs_on_nodes_with_other_homes(tmp_path: Path) -> None:
    with home_cluster(tmp_path) as installation:
        home = installation.home(installation.machines[0])
        places = {"working_dir": str(home), "dataset_dir": str(home / "shards")}
        job_id = installation.submit(**SIX_RANKS, **places, sleep_sec=0.02)
        installation.wait_until(job_id, lambda job: job["step"] > 3)
        assert all(map(installation.process_tags, installation.machines))
        for pid in installation.all_tags():
            assert KEY_VARIABLE not in environment_of(pid)
        ended = installation.complete(job_id)
        assert ended["restarts"] == 0
