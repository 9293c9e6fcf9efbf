"""Jobs whose agents are Pods of a stand-in for Kubernetes, asked by the official client."""

import signal
from collections.abc import Iterator

import pytest

from tests.support.clusters import ClusterInstallation, needs_cluster
from tests.support.installation import await_value, is_running
from tests.support.kubernetes import Kubernetes, kubernetes_cluster, needs_kubernetes

pytestmark = [needs_kubernetes(), needs_cluster(), pytest.mark.timeout(180)]

JOB = {
    "mode": "synchronous",
    "world_size": 6,
    "epochs": 3,
    "virtual_shards": 8,
    "engine": "kubernetes",
    "engine_options": {"ranks_per_host": 2, "image": "REGISTRY/muster-coordinator", "mem": "1Gi"},
}
ENDLESS = {**JOB, "epochs": 100_000, "sleep_sec": 0.02}


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ClusterInstallation, Kubernetes]]:
    root = tmp_path_factory.mktemp("kubernetes")
    with kubernetes_cluster(root, CHECKPOINT_DIR=str(root / "shared" / "checkpoints")) as both:
        yield both


@pytest.fixture
def installation(both: tuple[ClusterInstallation, Kubernetes]) -> Iterator[ClusterInstallation]:
    installation, kubernetes = both
    yield installation
    installation.end_jobs()
    await_value(lambda: not kubernetes.phases(), lambda: f"left: {kubernetes.phases()}")


@pytest.fixture
def kubernetes(both: tuple[ClusterInstallation, Kubernetes]) -> Kubernetes:
    return both[1]


def test_a_job_trains_in_pods_as_it_does_here(installation: ClusterInstallation) -> None:
    digests = []
    for fields in (JOB, {**JOB, "engine": "local", "engine_options": {}, "world_size": 2}):
        job_id = installation.submit(**fields)
        installation.complete(job_id)
        audit = installation.request("GET", f"/jobs/{job_id}/audit").json()
        assert audit["exactly_once"]
        digests.append(audit["checkpoints"][-1]["digest"])
    assert digests[0] == digests[1]


def test_pods_outlive_a_coordinator(
    installation: ClusterInstallation, kubernetes: Kubernetes
) -> None:
    job_id = installation.submit(**ENDLESS)
    seen = installation.wait_until(job_id, lambda it: is_running(it) and it["step"] > 10)
    pods = kubernetes.phases()
    installation.restart_coordinator(signal.SIGKILL)
    wanted = seen["step"] + 50
    later = installation.wait_until(job_id, lambda it: is_running(it) and it["step"] > wanted)
    assert kubernetes.phases() == pods
    assert [it["restarts"] for it in later["workers"]] == [0] * 6


def test_a_pod_that_is_evicted_is_replaced(
    installation: ClusterInstallation, kubernetes: Kubernetes
) -> None:
    job_id = installation.submit(**ENDLESS)
    installation.wait_until(job_id, lambda it: is_running(it) and it["step"] > 10)
    kubernetes.evict(next(it for it in kubernetes.phases() if it.endswith("kubernetes-2-g1")))
    await_value(
        lambda: any(it.endswith("kubernetes-2-g2") for it in kubernetes.phases()),
        lambda: installation.describe(job_id),
    )
    step = installation.see(job_id)["step"]
    installation.wait_until(job_id, lambda it: is_running(it) and it["step"] > step + 50)
    lost = [it["message"] for it in installation.events(job_id) if it["kind"] == "agent_lost"]
    assert "Evicted The node was low on memory." in lost[0]


def test_a_pod_without_a_node_says_why(
    installation: ClusterInstallation, kubernetes: Kubernetes
) -> None:
    kubernetes.is_held = True
    job_id = installation.submit(**JOB)
    seen = installation.wait_until(job_id, lambda it: it["reason"] == "waiting_for_slots")
    assert "Pending: no node fits, since" in seen["message"]
    kubernetes.is_held = False
    installation.complete(job_id)


def test_an_api_that_refuses_pods_is_quoted(
    installation: ClusterInstallation, kubernetes: Kubernetes
) -> None:
    kubernetes.answers += [403] * 10
    seen = installation.fail(installation.submit(**JOB))
    kubernetes.answers.clear()
    assert seen["reason"] == "engine_refused"
    assert "Kubernetes answers 403: as the test wants" in seen["message"]


def test_an_api_that_is_away_holds_up_no_training(
    installation: ClusterInstallation, kubernetes: Kubernetes
) -> None:
    job_id = installation.submit(**ENDLESS)
    seen = installation.wait_until(job_id, lambda it: is_running(it) and it["step"] > 10)
    kubernetes.answers += [503] * 1000
    installation.restart_coordinator(signal.SIGKILL)
    wanted = seen["step"] + 100
    installation.wait_until(job_id, lambda it: is_running(it) and it["step"] > wanted)
    kubernetes.answers.clear()
    assert len(kubernetes.phases()) == 3
