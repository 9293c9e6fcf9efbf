"""A cluster of nodes on three machines: it forms, trains, loses a machine and regains it.

Nothing but the secret is given to them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.installation import await_value
from tests.support.nodes import Cluster, nodes

pytestmark = [needs_hosts(), pytest.mark.timeout(400)]


SCRIPT = """
import os, time
print("has", len(os.environ["KEY"]), "works in", os.getcwd(), flush=True)
time.sleep(4)
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(3, tmp_path / "hosts") as made:
        yield made


@pytest.fixture
def cluster(machines: list[Host], tmp_path: Path) -> Iterator[Cluster]:
    with nodes(machines, ["cli", "node"]) as running:
        running.start(*machines)
        yield Cluster(running, tmp_path / "job.json")


def test_a_follower_that_dies_and_comes_back_changes_no_bit(
    cluster: Cluster, machines: list[Host]
) -> None:
    calm = cluster.submit(machines[-1])  # which waits until a node leads
    leader = cluster.leader()
    first, last = (each for each in machines if each is not leader)
    digest = cluster.result(first, leader, calm)
    names = {machine.name for machine in machines}
    job = cluster.submit(last)
    shown = lambda: cluster.muster(first, "events", job)  # noqa: E731
    await_value(lambda: cluster.nodes_of(first, job) == names, shown)
    last.power_off()
    await_value(lambda: cluster.nodes_of(first, job) == names - {last.name}, shown)
    last.power_on()
    cluster.nodes.start(last)
    assert cluster.result(first, leader, job) == digest
    assert shown().count(f"{last.name} and its ranks") == 1, shown()
    shown_hosts = cluster.read(last, "hosts")
    assert {each["host"]: each["is_linked"] for each in shown_hosts["hosts"]} == dict.fromkeys(
        names, True
    )
    assert (shown_hosts["leader"], {*shown_hosts["ring"]}) == (leader.name, names)


def test_a_node_that_ends_is_drained_and_comes_back(cluster: Cluster, machines: list[Host]) -> None:
    leader = cluster.leader()
    first, last = (each for each in machines if each is not leader)
    job = cluster.submit(first, epochs=40)
    names = {machine.name for machine in machines}
    shown = lambda: cluster.muster(first, "events", job)  # noqa: E731
    await_value(lambda: cluster.nodes_of(first, job) == names, shown)
    assert cluster.nodes.stop(last) == 0
    hosts_shown = lambda: {each["host"] for each in cluster.ask(first, "/hosts")["hosts"]}  # noqa: E731
    await_value(lambda: hosts_shown() == names - {last.name}, shown)
    assert not last.processes(), "nothing is orphaned"
    cluster.nodes.start(last)
    await_value(lambda: cluster.nodes_of(first, job) == names, shown)
    cluster.result(first, leader, job)
    assert "given up" not in shown(), shown()


def test_the_leader_is_switched_off_and_comes_back(cluster: Cluster, machines: list[Host]) -> None:
    leader = cluster.leader()
    first, last = (each for each in machines if each is not leader)
    digest = cluster.result(first, leader, cluster.submit(first, sleep_sec=0))
    names = {machine.name for machine in machines}
    job = cluster.submit(first, sleep_sec=0.3)
    shown = lambda: cluster.muster(first, "events", job)  # noqa: E731
    step = lambda: cluster.ask(last, f"/jobs/{job}/summary")["step"]  # noqa: E731
    await_value(lambda: cluster.nodes_of(first, job) == names, shown)
    await_value(lambda: cluster.has_copies(leader), shown)
    leader.power_off()
    second = cluster.leader(leader)
    taken = step()
    await_value(lambda: step() > taken + 3, shown)
    leader.power_on()
    cluster.nodes.start(leader)
    await_value(lambda: cluster.has_copies(second), shown)
    assert cluster.leader() is second
    assert cluster.result(leader, second, job) == digest
    assert shown().count(f"{leader.name} and its ranks") == 1, shown()


def test_a_leader_that_ends_hands_over(cluster: Cluster, machines: list[Host]) -> None:
    leader = cluster.leader()
    others = [each for each in machines if each is not leader]
    job = cluster.submit(others[0], epochs=40)
    shown = lambda: cluster.muster(others[0], "events", job)  # noqa: E731
    names = {machine.name for machine in machines}
    await_value(lambda: cluster.nodes_of(others[0], job) == names, shown)
    await_value(lambda: cluster.has_copies(leader), shown)
    assert cluster.nodes.stop(leader) == 0
    assert not leader.processes(), "nothing is orphaned"
    second = cluster.leader(leader)
    hosts_shown = {each["host"] for each in cluster.ask(second, "/hosts")["hosts"]}
    assert hosts_shown == names - {leader.name}
    assert "given up" not in shown(), shown()
    cluster.result(others[0], second, job)


def test_a_script_runs_in_the_home_of_each_machine_that_has_it(
    cluster: Cluster, machines: list[Host]
) -> None:
    leader = cluster.leader()
    without, last = (each for each in machines if each is not leader)
    for host in (leader, last):
        (host.directory / host.name / "train.py").write_text(SCRIPT)
    cluster.keep_secret(without, "key", "abcde")
    assert "key" in cluster.muster(last, "secret", "ls")
    secret = ["--secret", "KEY=file:key"]
    job = cluster.submit_words(last, "-n", "10", *secret, "--", sys.executable, "train.py")
    cluster.complete(without, job)
    logs = cluster.muster(without, "logs", job)
    homes = {line.split()[-1] for line in logs.splitlines() if "has 5 works in" in line}
    assert homes == {cluster.nodes.environ(host)["HOME"] for host in (leader, last)}, logs
    events = cluster.muster(without, "events", job)
    assert f"{without.name}" in events, events


def test_ranks_that_others_may_run_too_wait_for_a_majority(
    machines: list[Host], tmp_path: Path
) -> None:
    pair = machines[:2]
    with nodes(pair, ["cli", "node"]) as running:
        running.start(*pair)
        cluster = Cluster(running, tmp_path / "job.json")
        leader = cluster.leader()
        (other,) = (each for each in pair if each is not leader)
        words = ("-n", "2", "--", "sleep", "600")
        job = cluster.submit_words(other, *words)
        shown = lambda: cluster.muster(other, "events", job)  # noqa: E731
        await_value(lambda: cluster.nodes_of(other, job), shown)
        await_value(lambda: cluster.has_copies(leader), shown)
        leader.power_off()
        assert cluster.leader(leader) is other
        await_value(lambda: "muster node forget NAME" in shown(), shown)
        await_value(lambda: not cluster.nodes_of(other, job), shown)
        cluster.muster(other, "node", "forget", leader.name)
        await_value(lambda: cluster.nodes_of(other, job) == {other.name}, shown)
