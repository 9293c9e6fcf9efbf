"""What hosts say about themselves, over real ssh."""

import platform
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster.contracts.interpreter import VERSION
from muster.contracts.settings.paths import DataDir
from muster.host.limits import usable_processors
from tests.support.clusters import ClusterInstallation, cluster, needs_cluster
from tests.support.installation import await_value, newest_checkpoint

pytestmark = needs_cluster()

Hosts = list[dict[str, Any]]


def hosts_when(installation: ClusterInstallation, condition: Callable[[Hosts], object]) -> Hosts:
    """Return what ``GET /hosts`` shows once it meets a condition."""

    def read() -> Hosts:
        found: Hosts = installation.request("GET", "/hosts").json()["hosts"]
        return found

    return await_value(
        lambda: found if condition(found := read()) else None, lambda: f"hosts: {read()}"
    )


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
            installation.complete(job_id)
            events = installation.events(job_id)
            # A rank may be done before another host has started its own.
            starts = [it["message"] for it in events if it["kind"] == "rank_started"]
            assert len({words.rpartition(" on ")[2] for words in starts}) == expected
            senders = [it["message"] for it in events if it["kind"] == "checkpoints_sent"]
            assert [it.split()[0] for it in senders] == ["host-2"]
        assert len(installation.checkpoints(alone, 6)) == 6
        assert newest_checkpoint(place / together, 0, None).step > 0
        # One may be under way.
        await_value(lambda: not list(place.glob(".muster-probe-*")), lambda: f"left in {place}")


def test_no_job_tries_a_host_that_cannot_start_an_agent(tmp_path: Path) -> None:
    with cluster(tmp_path, count=2) as installation:
        host = installation.machines[1]
        data_dir = f"{host.local}/data"
        host.run("mkdir", "-p", data_dir)
        host.run("mount", "-t", "tmpfs", "-o", "ro", "none", data_dir)
        installation.restart_coordinator(signal.SIGTERM)
        hosts = hosts_when(installation, lambda hosts: hosts[1]["problem"])
        assert hosts[1]["problem"].startswith(f"{data_dir} cannot be written: ")
        assert hosts[1]["facts"] is not None
        job_id = installation.submit(world_size=1, hosts=[host.name])
        installation.wait_until(job_id, lambda _: installation.job(job_id)["message"])
        assert f"{host.name}: {data_dir} cannot be written: " in installation.job(job_id)["message"]
        assert installation.complete(installation.submit(world_size=2))["restarts"] == 0
        host.run("umount", data_dir)
        installation.restart_coordinator(signal.SIGTERM)
        installation.complete(job_id)
        assert "agent_lost" not in installation.kinds(job_id)


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


def test_ended_jobs_leave_nothing_on_a_host_that_is_back(tmp_path: Path) -> None:
    """The logs of one job are fetched first; the other job is deleted meanwhile."""
    with cluster(tmp_path, count=2) as installation:
        host = installation.machines[1]
        script = tmp_path / "shared" / "printing.py"
        script.write_text(
            "import time\nfor i in range(10**6): print(i, flush=True); time.sleep(0.01)"
        )
        jobs = [
            installation.submit(
                world_size=1,
                hosts=[host.name],
                command=["python", str(script)],
                working_dir=str(script.parent),
            )
            for _ in range(2)
        ]
        away = [DataDir(host.directory / "data").job(job_id) for job_id in jobs]
        await_value(
            lambda: all(it.log(0, 0).exists() and it.log(0, 0).stat().st_size for it in away),
            lambda: f"{installation.describe(jobs[0])}",
        )
        host.power_off()
        printed = away[0].log(0, 0).read_bytes()
        for job_id in jobs:
            installation.stop(job_id, grace_seconds=0)
            installation.wait_until(job_id, lambda seen: seen["status"] == "STOPPED")
        assert installation.request("DELETE", f"/jobs/{jobs[1]}").is_success
        installation.forget(jobs[1])
        host.power_on()
        installation.boot(host)
        installation.restart_coordinator(signal.SIGTERM)
        await_value(lambda: not any(it.root.exists() for it in away), lambda: f"left: {away}")
        fetched = DataDir(installation.machines[0].directory / "data").job(jobs[0])
        assert fetched.log(0, 0).read_bytes() == printed
