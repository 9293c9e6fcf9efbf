"""Three machines of a household: they meet, are cut off, freeze, die and come back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.homes import HomeScript, Household, ask_all, household, meet
from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.nodes import nodes

pytestmark = needs_hosts()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(4, tmp_path / "hosts") as made:
        yield made


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Household]:
    with household(tmp_path) as made:
        yield made


def test_a_lost_machine_and_its_return(machines: list[Host], home: Household) -> None:
    *others, victim = machines[:3]
    scripts = home.scripts(3, *others, victim)
    names = meet(scripts, preset="fast")[2]
    name = names["names"][names["rank"]]
    for lose, find in (victim.cut, victim.heal), (lambda *_: victim.freeze(), victim.thaw):
        lose(*others)
        for said in ask_all(scripts[:2], "reduce"):
            assert (said["error"], said["name"]) == ("PeerGone", name)
        assert len(ask_all(scripts[:2], "meet")[0]["members"]) == 2
        find()
        said = scripts[2].call("reduce")
        if "error" not in said:  # what the others had sent before may have come
            said = scripts[2].call("reduce")
        assert said["error"] == "PeerGone"
        scripts[2].ask("meet", timeout_seconds=5.0)
        said = scripts[2].answer()
        assert "a group of that name lives" in said["text"]
        scripts[2].ask("meet")
        together = [*ask_all(scripts[:2], "meet"), scripts[2].answer()]
        assert {len(each.get("members", [])) for each in together} == {3}, together
        name = together[2]["names"][together[2]["rank"]]


def test_a_stranger_joins_nothing_and_stops_nothing(machines: list[Host], home: Household) -> None:
    stranger = home.start(machines[3], MUSTER_CLUSTER_KEY="a secret of another household")
    stranger.answer()
    stranger.ask("discover", peers=1, timeout_seconds=8.0)
    scripts: list[HomeScript] = home.scripts(3, *machines[:3])
    assert {len(said["members"]) for said in meet(scripts)} == {3}
    assert [said["sum"] for said in ask_all(scripts, "reduce")] == [3.0] * 3
    said = stranger.answer()
    assert said["error"] == "Timeout"
    assert "linked: none" in said["text"]
    assert "another secret" in said["text"]
    assert [said["sum"] for said in ask_all(scripts, "reduce")] == [3.0] * 3


def test_an_address_that_changes_loses_no_member(machines: list[Host], home: Household) -> None:
    scripts = home.scripts(2, *machines[:2])
    meet(scripts)
    moved = machines[0]
    moved.run("ip", "address", "flush", "dev", "eth0")
    moved.run("ip", "address", "add", "10.0.0.77/24", "dev", "eth0")
    moved.run("ip", "route", "add", "224.0.0.0/4", "dev", "eth0")
    scripts[0].ask("reduce", size=1 << 20)
    said = [scripts[1].call("reduce", size=1 << 20), scripts[0].answer()]
    assert [each.get("error") for each in said] == ["PeerGone"] * 2, said
    anew = ask_all(scripts, "meet")
    assert {len(each.get("members", [])) for each in anew} == {2}, anew
    assert [said["sum"] for said in ask_all(scripts, "reduce")] == [2.0, 2.0]


def test_nodes_follow_another_master_while_one_is_cut_off(machines: list[Host]) -> None:
    with nodes(machines[:3]) as running:
        running.start(*machines[:3])
        first = running.await_master(machines[:3])
        lost = next(host for host in machines if running.ids.get(host) == first)
        others = [host for host in machines[:3] if host is not lost]
        lost.cut(*others)
        running.await_master(others, former=first)
        lost.heal()
        assert running.await_master(machines[:3]) == first  # of two masters the senior one stays
        status = running.mesh(lost)
        assert (status.master, status.state) == (first, "master")
        assert set(status.ring) == {running.ids[host] for host in machines[:3]}
        assert running.end() == {0}
        assert not [*lost.directory.glob("node/up.json")]
