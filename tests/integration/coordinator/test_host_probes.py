"""What hosts say about themselves, over real ssh."""

import platform
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster.contracts.interpreter import VERSION
from muster.host.limits import usable_processors
from tests.support.clusters import ClusterInstallation, cluster, needs_cluster
from tests.support.installation import await_value, newest_checkpoint

pytestmark = [needs_cluster(), pytest.mark.timeout(120)]

Hosts = list[dict[str, Any]]


def hosts_when(installation: ClusterInstallation, condition: Callable[[Hosts], object]) -> Hosts:
    """Return what ``GET /hosts`` shows once it meets a condition."""

    def look() -> Hosts:
        found: Hosts = installation.request("GET", "/hosts").json()["hosts"]
        return found

    return await_value(
        lambda: found if condition(found := look()) else None, lambda: f"hosts: {look()}"
    )


def nodes(job: dict[str, Any]) -> set[str]:
    return {worker["node"] for worker in job["workers"]}


def test_every_host_says_what_it_has(tmp_path: Path) -> None:
    with cluster(tmp_path) as installation:
        hosts = hosts_when(installation, lambda hosts: all(it["seen_at"] for it in hosts))
        assert len(hosts) == len(installation.machines)
        for host in hosts:
            facts = host["facts"]
            assert (facts["version"], facts["machine"]) == (VERSION, platform.machine())
            assert facts["numpy"] == np.__version__
            assert facts["cpu_cores"] == usable_processors()
            assert host["problem"] is None
        assert [it["shared_dir"] for it in hosts[1:]] == [None, None]


def test_jobs_save_in_a_directory_that_some_hosts_share(tmp_path: Path) -> None:
    place = tmp_path / "shared" / "checkpoints"
    with cluster(tmp_path, CHECKPOINT_DIR=str(place)) as installation:
        hosts_when(installation, lambda hosts: all(it["shared_dir"] for it in hosts[1:]))
        # The last host loses the shared disk.
        installation.machines[2].run("mount", "-t", "tmpfs", "none", str(place))
        installation.restart_coordinator(signal.SIGTERM)
        hosts = hosts_when(installation, lambda hosts: hosts[2]["shared_dir"] is None)
        assert hosts[1]["shared_dir"] == str(place)
        alone = installation.submit(world_size=6, sleep_sec=0.1)
        together = installation.submit(
            mode="synchronous", world_size=4, hosts=["host-1", "host-2"], sleep_sec=0.1
        )
        for job_id, expected in ((alone, 3), (together, 2)):
            installation.wait_until(job_id, lambda job, count=expected: len(nodes(job)) == count)
            installation.complete(job_id)
            events = installation.events(job_id)
            senders = [it["message"] for it in events if it["kind"] == "checkpoints_sent"]
            assert [it.split()[0] for it in senders] == ["host-2"]
        assert len(installation.checkpoints(alone, 6)) == 6
        assert newest_checkpoint(place / together, 0, None).step > 0
        # One may be under way.
        await_value(lambda: not list(place.glob(".muster-probe-*")), lambda: f"left in {place}")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="OpenBLAS has other kernels elsewhere")
def test_hosts_that_differ_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)  # it would be that of all hosts
    with cluster(tmp_path, slots=1, own=[{}, {"OPENBLAS_CORETYPE": "Nehalem"}]) as installation:
        hosts = hosts_when(installation, lambda hosts: all(it["seen_at"] for it in hosts))
        kernels = [it["facts"]["blas_kernel"] for it in hosts]
        assert kernels[1] == "Nehalem" != kernels[0] == kernels[2]
        for bits, told in (
            ("same", "all use the kernels of Nehalem"),
            ("any", "its bits are not promised"),
        ):
            job_id = installation.submit(
                mode="synchronous", world_size=3, min_workers=3, bits=bits, epochs=2
            )
            installation.complete(job_id)
            events = {it["kind"]: it["message"] for it in installation.events(job_id)}
            assert told in events["hosts_differ"]
            assert "ranks 0, 1, 2 train together" in events["group_announced"]
