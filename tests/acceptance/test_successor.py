"""Another machine leads once the first one is switched off, with a copy of its rows."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.installation import await_value
from tests.support.nodes import Cluster, nodes

pytestmark = [needs_hosts(), pytest.mark.timeout(400)]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(3, tmp_path / "hosts") as made:
        yield made


@pytest.fixture
def cluster(machines: list[Host], tmp_path: Path) -> Iterator[Cluster]:
    with nodes(machines, ["cli", "node"]) as running:
        running.start(*machines)
        yield Cluster(running, tmp_path / "job.json")


def is_answered(cluster: Cluster, host: Host, job: str) -> bool:
    try:
        return bool(cluster.ask(host, f"/jobs/{job}/summary"))
    except OSError:
        return False


def common_step(cluster: Cluster, host: Host, job: str) -> int:
    workers = cluster.ask(host, f"/jobs/{job}/summary")["workers"]
    return min((each["step"] or 0 for each in workers if each["pid"]), default=0)


def test_training_goes_on_under_another_machine(cluster: Cluster, machines: list[Host]) -> None:
    leader = cluster.leader()
    calm = cluster.submit(machines[-1], epochs=30)
    second, last = (each for each in machines if each is not leader)
    digest = cluster.result(second, leader, calm)
    job = cluster.submit(last, epochs=30)
    shown = lambda: cluster.muster(last, "events", job)  # noqa: E731
    names = {machine.name for machine in machines}
    await_value(lambda: cluster.nodes_of(second, job) == names, shown)
    await_value(lambda: common_step(cluster, second, job) > 20, shown)
    step = max(each["step"] or 0 for each in cluster.ask(second, f"/jobs/{job}/summary")["workers"])
    await_value(lambda: cluster.has_copies(leader), str)
    leader.power_off()
    second = cluster.leader(leader)

    def has_new_step() -> bool:
        try:
            return common_step(cluster, second, job) > step + 3
        except OSError:
            return False

    await_value(has_new_step, lambda: "", 60)
    assert cluster.result(last, second, job) == digest
    assert shown().count("the requested checkpoint of step") == 1, shown()
    assert (second.directory / "node" / "jobs" / job / "logs").is_dir(), "the logs are there"


COMMAND = "import time\nwhile True: time.sleep(1)"


def test_ranks_that_train_alone_run_on_or_are_held(cluster: Cluster, machines: list[Host]) -> None:
    leader = cluster.leader()
    second, last = (each for each in machines if each is not leader)
    names = {machine.name for machine in machines}
    alone = cluster.submit(
        last, mode="independent", world_size=3, epochs=100000, checkpoint_every=5
    )
    command = [sys.executable, "-c", COMMAND]
    bare = cluster.submit(last, mode="independent", world_size=3, epochs=1, command=command)
    both = (alone, bare)
    for job in both:
        await_value(
            lambda job=job: cluster.nodes_of(second, job) == names,
            lambda job=job: cluster.muster(last, "events", job),
        )

    def workers(job: str) -> list[dict[str, object]]:
        return cluster.ask(second, f"/jobs/{job}/summary")["workers"]

    def have_saved() -> bool:
        return all(each["checkpoints_saved"] for each in workers(alone))

    await_value(have_saved, lambda: str(workers(alone)))
    before = {
        job: {each["rank"]: each["pid"] for each in workers(job) if each["node"] != leader.name}
        for job in both
    }
    lost = {
        job: next(each["rank"] for each in workers(job) if each["node"] == leader.name)
        for job in both
    }
    await_value(lambda: cluster.has_copies(leader), str)
    leader.power_off()
    second = cluster.leader(leader)
    shown = lambda: "".join(cluster.muster(last, "events", job) for job in both)  # noqa: E731

    def is_replaced() -> bool:
        try:
            found = {each["rank"]: each for each in workers(bare)}[lost[bare]]
            status = cluster.ask(second, f"/jobs/{alone}/summary")
        except OSError:
            return False
        return (
            bool(found["pid"]) and found["node"] != leader.name and status["status"] == "RECOVERING"
        )

    await_value(is_replaced, shown, 100)
    for job in both:
        now = {each["rank"]: each["pid"] for each in workers(job) if each["rank"] in before[job]}
        assert now == before[job], shown()
    held = {each["rank"]: each for each in workers(alone)}[lost[alone]]
    assert held["pid"] is None, held
    assert f"ranks {lost[alone]} (step" in shown(), shown()


def test_a_node_that_is_killed_while_it_leads_ends_no_rank(
    cluster: Cluster, machines: list[Host]
) -> None:
    leader = cluster.leader()
    _, last = (each for each in machines if each is not leader)
    names = {machine.name for machine in machines}
    digest = cluster.result(last, leader, cluster.submit(last, sleep_sec=0))
    job = cluster.submit(last, sleep_sec=0.2)
    shown = lambda: cluster.muster(last, "events", job)  # noqa: E731
    await_value(lambda: cluster.nodes_of(last, job) == names, shown)
    await_value(lambda: cluster.has_copies(leader), shown)
    cluster.nodes.kill(leader)
    second = cluster.leader(leader)
    cluster.nodes.start(leader)
    assert cluster.result(last, second, job) == digest
    logs = second.directory / "node" / "jobs" / job / "logs"
    assert len([*logs.glob("rank_*.000.log")]) >= 4, "those of the other machines"
