"""Agents in the very Pods that the launcher makes: podman plays them."""

from collections.abc import Iterator

import pytest

from tests.support.clusters import (
    ENDLESS,
    SIX_RANKS,
    ClusterInstallation,
    lent_cluster,
    needs_cluster,
    scheduler_cluster,
    trains,
)
from tests.support.installation import await_value
from tests.support.kubernetes import needs_kubernetes
from tests.support.podman import Podman, needs_podman

pytestmark = [needs_podman(), needs_cluster(), needs_kubernetes(), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ClusterInstallation, Podman]]:
    with scheduler_cluster(tmp_path_factory.mktemp("pods"), Podman, count=2) as both:
        yield both


@pytest.fixture
def installation(both: tuple[ClusterInstallation, Podman]) -> Iterator[ClusterInstallation]:
    yield from lent_cluster(*both)
    assert not both[1].containers()


@pytest.fixture
def podman(both: tuple[ClusterInstallation, Podman]) -> Podman:
    return both[1]


def test_a_job_trains_in_a_real_pod_as_it_does_here(
    installation: ClusterInstallation, podman: Podman
) -> None:
    job = {**SIX_RANKS, "world_size": 2}
    job_id = installation.submit(**job, **podman.fields)
    installation.complete(job_id)
    here = installation.submit(**job, engine="local")
    installation.complete(here)
    assert installation.last_digest(job_id) == installation.last_digest(here)


def test_ranks_of_a_pod_that_has_to_go_save(
    installation: ClusterInstallation, podman: Podman
) -> None:
    job = {**ENDLESS, "world_size": 2, "checkpoint_every": 100_000}
    job_id = installation.submit(**job, **podman.fields)
    seen = installation.wait_until(job_id, trains(20))
    (name,) = podman.jobs()
    podman.take_away(name)
    await_value(lambda: name not in podman.jobs(), lambda: f"{podman.jobs()}")
    later = installation.wait_until(job_id, trains(seen["step"] + 50))
    assert later["last_checkpoint_step"] >= seen["step"]
