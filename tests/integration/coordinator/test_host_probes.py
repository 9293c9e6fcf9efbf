"""What hosts say about themselves, over real ssh."""

import os
import platform
from pathlib import Path

import numpy as np
import pytest

from muster.contracts.interpreter import VERSION
from tests.support.clusters import cluster, needs_cluster
from tests.support.installation import await_value


@needs_cluster()
@pytest.mark.timeout(120)
def test_every_host_says_what_it_has(tmp_path: Path) -> None:
    with cluster(tmp_path) as installation:

        def answered() -> list[dict[str, object]]:
            found = installation.request("GET", "/hosts").json()["hosts"]
            return [it for it in found if it["seen_at"]]

        hosts = await_value(
            lambda: found if len(found := answered()) == 3 else None,
            lambda: f"hosts: {installation.request('GET', '/hosts').json()}",
        )
        for host in hosts:
            facts = host["facts"]
            assert (facts["version"], facts["machine"]) == (VERSION, platform.machine())
            assert facts["numpy"] == np.__version__
            assert facts["cpu_cores"] == len(os.sched_getaffinity(0))
            assert host["problem"] is None
