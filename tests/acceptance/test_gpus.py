"""Jobs whose ranks have GPUs of their own, under the services and with a made-up `nvidia-smi`."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gpus import install_gpus
from tests.support.installation import Installation, await_value, is_running

SAY = "echo $CUDA_VISIBLE_DEVICES; "
UNTIL_KILLED = ["sh", "-c", f"{SAY} sleep 600"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpus")


@pytest.fixture(scope="module")
def uuids(root: Path) -> list[str]:
    return install_gpus(root / "bin", 2)


@pytest.fixture(scope="module")
def installation(root: Path, uuids: list[str]) -> Iterator[Installation]:
    path = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with Installation(root, PATH=path, CUDA_VISIBLE_DEVICES=",".join(uuids)) as installation:
        yield installation


def test_a_gang_waits_for_the_gpus_of_another_job(
    installation: Installation, uuids: list[str], tmp_path: Path
) -> None:
    first = installation.submit(world_size=1, command=UNTIL_KILLED, gpus_per_rank=2)
    installation.wait_until(first, is_running)
    command = ["sh", "-c", f"{SAY} until [ -e {tmp_path}/gate ]; do sleep 0.05; done"]
    gang = installation.submit(
        world_size=2, restart_scope="gang", command=command, gpus_per_rank=1, max_fruitless=1
    )
    words = "rank 0 found 0 of 2 free GPUs on its host; all ranks are started again"
    await_value(
        lambda: installation.job(gang)["message"] == words, lambda: installation.describe(gang)
    )
    installation.restart_coordinator(signal.SIGKILL)
    assert installation.log(first).split() == [",".join(uuids)]
    installation.stop(first, grace_seconds=0)
    installation.wait_until(gang, is_running)
    (tmp_path / "gate").touch()
    installation.complete(gang)
    assert sorted(installation.log(gang, rank).strip() for rank in range(2)) == sorted(uuids)


def test_more_gpus_than_the_host_has_fail_the_job(installation: Installation) -> None:
    job = installation.fail(installation.submit(world_size=1, command=["true"], gpus_per_rank=3))
    assert job["reason"] == "invalid_program"
    assert "the job needs 3 GPUs at once, and its host has 2 for it" in job["message"]
