"""Jobs whose ranks have GPUs of their own, under the services and with a made-up `nvidia-smi`."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
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
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "XDG_STATE_HOME": str(root)}
    with Installation(root, PATH=path, **environment) as installation:
        yield installation


@pytest.fixture(scope="module")
def two_installations(root: Path, uuids: list[str]) -> Iterator[tuple[Installation, Installation]]:
    """Services with a cluster, of which each believes that the GPU is its own."""
    path = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    node = f"gpus: [{{uuid: {uuids[0]}, type: T, vram_mb: 16000}}], slots: 8, max_adapters: 8"
    description = root / "cluster.yaml"
    description.write_text(f"nodes: [{{name: gpu-box, host: localhost, {node}}}]")
    own = {"PATH": path, "MUSTER_CLUSTER": str(description), "XDG_STATE_HOME": str(root)}
    with ExitStack() as stack:
        first, second = (root / name for name in ("first", "second"))
        for each in first, second:
            each.mkdir()
        yield (
            stack.enter_context(Installation(first, **own)),
            stack.enter_context(Installation(second, **own)),
        )


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


def test_a_job_waits_for_memory_that_another_installation_has(
    two_installations: tuple[Installation, Installation], uuids: list[str]
) -> None:
    first, second = two_installations
    needs = {"world_size": 1, "command": UNTIL_KILLED, "vram_mb": 8000}
    holder = first.submit(**needs)
    first.wait_until(holder, is_running)
    # The last try is at the end of the wait, after seconds instead of half a minute.
    job = second.submit(**needs, vram_wait_seconds=6)
    words = (
        "rank 0 waits for 8000 MB of GPU memory on gpu-box: "
        f"5600 MB free on {uuids[0]}; next try in 6 s; it is started again"
    )
    await_value(lambda: second.job(job)["message"] == words, lambda: second.describe(job))
    first.stop(holder, grace_seconds=0)
    second.wait_until(job, is_running)
    assert second.log(job).strip() == uuids[0]
    failed = first.fail(first.submit(**needs, vram_wait_seconds=1))
    assert failed["reason"] == "host_exhausted"
    assert failed["message"] == (
        "rank 0: has waited 1 s (vram_wait_seconds) for 8000 MB of GPU memory on gpu-box: "
        f"5600 MB free on {uuids[0]}; rank 0 of {job} holds 8000 MB of it"
    )
    second.stop(job, grace_seconds=0)
