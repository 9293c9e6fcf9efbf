"""A job with compressed gradients has the same bits on one host and over several, whatever dies."""

import os
import signal
from collections.abc import Iterator

import pytest

from muster.checkpoints.comparison import identity_of
from muster.checkpoints.listing import checkpoint_dirs
from tests.support import noise
from tests.support.clusters import ClusterInstallation, cluster, needs_cluster, trains
from tests.support.marks import long

pytestmark = [needs_cluster(), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInstallation]:
    with cluster(tmp_path_factory.mktemp("cluster")) as installation:
        yield installation


def identity(installation: ClusterInstallation, job_id: str) -> str:
    (place,) = checkpoint_dirs(installation.checkpoint_dir / job_id)
    return identity_of(place.newest())


JOB = {
    "mode": "synchronous",
    "program": f"{noise.__file__}:Noise",
    "virtual_shards": 8,
    "epochs": 30,
}


OTHER_KINDS: list[object] = ["bf16", "fp16", {"kind": "random", "ratio": 0.1}]


@pytest.mark.parametrize("kind", ["int8", *map(long, OTHER_KINDS)])
def test_hosts_give_the_bits_of_one(installation: ClusterInstallation, kind: object) -> None:
    alone = installation.submit(**JOB, compression=kind, world_size=1, hosts=["host-2"])
    installation.complete(alone)
    job_id = installation.submit(**JOB, compression=kind, world_size=5, sleep_sec=0.02)
    seen = installation.wait_until(job_id, trains(20))
    assert len({it["node"] for it in seen["workers"]}) == 3
    tags = installation.process_tags(installation.machines[1])
    rank = next(it["rank"] for it in seen["workers"] if it["node"] == "host-1")
    os.kill(next(pid for pid, tag in tags.items() if tag.startswith(f"{rank}/")), signal.SIGKILL)
    installation.wait_until(job_id, trains(seen["step"] + 20))
    installation.complete(job_id)
    assert identity(installation, job_id) == identity(installation, alone)


def test_each_reader_shows_what_compression_saves(installation: ClusterInstallation) -> None:
    hosts = ["host-1", "host-2"]
    job_id = installation.submit(**JOB, compression="bf16", world_size=4, hosts=hosts)
    installation.complete(job_id)
    curves = installation.request("GET", f"/jobs/{job_id}/series").json()["series"]
    found = {name: curve["live"]["last"][-1] for name, curve in curves.items()}
    before, after = found["compression.bytes_before"], found["compression.bytes_after"]
    assert found["compression.ratio"] == after / before == pytest.approx(0.5, rel=0.1)
    assert found["compression.duration_ms"] > 0
    assert curves["compression.ratio"]["live"]["count"] == curves["loss"]["live"]["count"]
    scraped = installation.request("GET", "/metrics").text
    assert f'metric="compression.ratio",name=""}} {found["compression.ratio"]}' in scraped


def test_host_without_a_group_is_named_by_one_event(installation: ClusterInstallation) -> None:
    job_id = installation.submit(**JOB, compression="int8", compression_groups=2, world_size=6)
    installation.complete(job_id)
    said = [event["message"] for event in installation.events(job_id)]
    (warning,) = [words for words in said if "computes nothing" in words]
    assert "of 3 hosts host-2 computes nothing" in warning
