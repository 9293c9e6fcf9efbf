"""Nodes of a household over real sockets: who leads, what is stored, and which way round."""

import secrets
import time
from pathlib import Path

import msgspec
import pytest

from muster.contracts.errors import MusterError
from muster.mesh.election import Stored
from muster.mesh.messages import Hello, Measured
from muster.mesh.network import Network
from muster.mesh.node import Node, Status
from muster.mesh.topology import Link
from tests.support.installation import await_value
from tests.support.networks import Home, await_link, find, gathering


class Machine:
    """A network and its node."""

    def __init__(self, home: Home, directory: Path, former: "Machine | None" = None) -> None:
        """Start it, or start a former one again."""
        name = secrets.token_hex(4)
        self.key: Path = former.key if former else directory / f"{name}.key"
        self.file: Path = former.file if former else directory / f"{name}.json"
        self.network = home.add(key=self.key)
        self.told: list[str] = []
        self.node = Node(self.network, self.file, self.told.append)

    def status(self) -> Status:
        return self.network.do(self.node.status)

    @property
    def stored(self) -> Stored:
        return msgspec.json.decode(self.file.read_bytes(), type=Stored)


def link(*machines: Machine) -> None:
    for one in machines:
        for other in machines:
            if one is not other:
                find(one.network, other.network)


def await_master(*machines: Machine) -> str:
    """Return the node that all of them follow."""

    def read() -> str | None:
        masters = {machine.status().master for machine in machines}
        return masters.pop() if len(masters) == 1 else None

    master = await_value(read, lambda: "\n".join(str(one.status()) for one in machines))
    assert master is not None
    assert sum(machine.status().state == "master" for machine in machines) <= 1
    return master


def machine_of(node_id: str, machines: list[Machine]) -> Machine:
    return next(one for one in machines if one.network.node_id == node_id)


def test_nodes_have_one_master_and_another_when_it_goes(home: Home, tmp_path: Path) -> None:
    machines = [Machine(home, tmp_path) for _ in range(3)]
    link(*machines)
    first = machine_of(await_master(*machines), machines)
    assert {machine.stored.clock for machine in machines} == {first.status().epoch}
    first.network.close()
    others = [machine for machine in machines if machine is not first]
    await_value(lambda: await_master(*others) != first.network.node_id, lambda: "no other")
    second = machine_of(await_master(*others), machines)
    assert second.status().epoch > first.stored.clock


def test_a_node_that_restarts_follows_the_master_that_is(home: Home, tmp_path: Path) -> None:
    senior, junior = Machine(home, tmp_path), Machine(home, tmp_path)
    link(senior, junior)
    master = await_master(senior, junior)
    stays = machine_of(master, [senior, junior])
    goes = junior if stays is senior else senior
    goes.network.close()
    back = Machine(home, tmp_path, goes)
    link(stays, back)
    assert await_master(stays, back) == master
    assert back.stored.session == 2


def test_a_session_from_a_backup_jumps_above_what_peers_know(home: Home, tmp_path: Path) -> None:
    stays, goes = Machine(home, tmp_path), Machine(home, tmp_path)
    goes.file.write_bytes(msgspec.json.encode(Stored(session=8)))
    goes.network.close()
    goes = Machine(home, tmp_path, goes)
    link(stays, goes)
    await_master(stays, goes)
    goes.network.close()
    goes.file.write_bytes(msgspec.json.encode(Stored(session=2)))
    back = Machine(home, tmp_path, goes)
    link(stays, back)
    await_value(lambda: back.stored.session > 9, lambda: str(back.stored))
    await_master(stays, back)


def test_a_torn_session_file_is_replaced(home: Home, tmp_path: Path) -> None:
    machine = Machine(home, tmp_path)
    machine.network.close()
    machine.file.write_text('{"sess')
    again = Machine(home, tmp_path, machine)
    assert again.stored.session == 1
    assert "cannot be read" in again.told[0]


def test_a_node_that_cannot_store_its_session_does_not_start(home: Home, tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="cannot be written"):
        Node(home.add(), tmp_path / "missing" / "election.json", print)


def test_a_node_leads_once_its_disk_has_room(home: Home, tmp_path: Path) -> None:
    disk, away = tmp_path / "disk", tmp_path / "away"
    disk.mkdir()
    machine = Machine(home, disk)
    disk.rename(away)
    await_value(lambda: machine.status().warnings, lambda: "no warning")
    assert "cannot be written" in machine.told[-1]
    await_value(lambda: machine.status().master is None, lambda: str(machine.status()))
    away.rename(disk)
    await_value(lambda: machine.status().state == "master", lambda: str(machine.status()))
    assert machine.status().warnings == ()


def test_a_copied_key_is_named_and_not_counted(home: Home, tmp_path: Path) -> None:
    first = Machine(home, tmp_path)
    copy = Machine(home, tmp_path, first)
    find(first.network, copy.network)
    await_value(lambda: first.status().warnings, lambda: "no warning")
    assert first.told.count(first.status().warnings[0]) == 1
    assert "has the key of this node" in first.told[-1]
    assert first.status().ring == (first.network.node_id,)


def test_a_node_stays_known_when_a_script_beside_it_ends(home: Home, tmp_path: Path) -> None:
    here, there = Machine(home, tmp_path), Machine(home, tmp_path)
    link(here, there)
    await_master(here, there)
    script = home.add(key=there.key)
    peers = here.network.peers
    find(script, here.network)
    find(here.network, script)  # each calls the other: two links, of which one ends first
    is_twice = lambda: script.own_id in peers and len(peers[script.own_id].links) > 1  # noqa: E731
    await_value(is_twice, lambda: f"{peers}")
    script.close()
    await_value(lambda: script.own_id not in peers, lambda: f"{peers}")
    assert len(here.status().ring) > 1


def test_the_second_process_of_a_node_counts_when_the_first_ends(
    home: Home, tmp_path: Path
) -> None:
    here, there = Machine(home, tmp_path), Machine(home, tmp_path)
    again = Machine(home, tmp_path, there)
    for other in (again, there):  # the hello of the first comes last
        find(here.network, other.network)
        await_link(here.network, other.network)
    there.network.close()
    is_gone = lambda: there.network.own_id not in here.network.peers  # noqa: E731
    await_value(is_gone, lambda: f"{here.network.peers}")
    assert len(here.status().ring) > 1
    assert await_master(here, again)


def test_a_new_link_tells_nothing_about_the_clock(home: Home, tmp_path: Path) -> None:
    here, there = Machine(home, tmp_path), Machine(home, tmp_path)
    link(here, there)
    await_master(here, there)

    def renew() -> None:
        peer = here.network.peers[there.network.own_id]
        peer.hello = _hours_ago(peer.hello)
        here.node.renew(peer)

    here.network.do(renew)
    assert here.status().warnings == ()


def test_a_clock_that_was_set_is_said_anew(home: Home, tmp_path: Path) -> None:
    here, there = Machine(home, tmp_path), home.add()
    late_seconds = [7200.0]
    Node(there, tmp_path / "late.json", print, lambda: time.time() - late_seconds[0])
    find(here.network, there)
    await_link(here.network, there)
    peer = here.network.peers[there.own_id]
    here.network.do(lambda: setattr(peer, "hello", _hours_ago(peer.hello)))
    late_seconds[0] = 0.0
    await_value(lambda: abs(peer.hello.clock - time.time()) < 60, lambda: f"{peer}")


def test_ranks_follow_the_ring_of_the_nodes(home: Home, tmp_path: Path) -> None:
    machines = sorted(
        (Machine(home, tmp_path) for _ in range(4)), key=lambda one: one.network.node_id
    )
    link(*machines)
    await_master(*machines)
    ids = [machine.network.node_id for machine in machines]
    order = (ids[0], ids[2], ids[1], ids[3])
    fast = zip(order, order[1:] + order[:1], strict=True)
    links = [_link(*sorted(pair), 1e9) for pair in fast]
    links += [_link(*pair, 1e6) for pair in [(ids[0], ids[1]), (ids[2], ids[3])]]
    for machine in machines[:2]:  # neither hears itself
        teach(machine.network, links)
    await_value(lambda: {one.status().ring for one in machines} == {order}, lambda: f"not {order}")
    scripts = [home.add(key=machine.key) for machine in machines]
    for script in scripts:
        for other in [*scripts, *(machine.network for machine in machines)]:
            find(script, other)
    for script in scripts:
        for machine in machines:
            await_link(script, machine.network)
    (closed,) = {
        future.result(60) for future in [gathering(one).wait_for("g", 4) for one in scripts]
    }
    assert tuple(each.node_id for each in gathering(scripts[0]).members_of(closed)) == order


def teach(network: Network, links: list[Link]) -> None:
    """Have a node say what it has measured."""

    def say() -> None:
        for process_id in network.peers:
            network.send(process_id, Measured(links=tuple(links)))

    network.do(say)


def _link(one: str, other: str, bytes_per_second: float) -> Link:
    return Link(
        nodes=(one, other),
        bytes_per_second=bytes_per_second,
        measured_at=1e12,
        addresses=frozenset(),
    )


def _hours_ago(hello: Hello) -> Hello:
    return msgspec.structs.replace(hello, clock=hello.clock - 7200)
