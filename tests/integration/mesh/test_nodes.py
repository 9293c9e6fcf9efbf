"""Nodes of a household over real sockets: who leads, what is stored, and which way round."""

import asyncio
import secrets
from pathlib import Path

import msgspec
import pytest

from muster.contracts.errors import MusterError
from muster.mesh.announce import Announced
from muster.mesh.doctor import examine
from muster.mesh.election import Stored
from muster.mesh.messages import Measured
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
    await_value(lambda: list(first.network.warnings), lambda: "no warning")
    assert "has the key of this node" in next(iter(first.network.warnings))
    assert first.status().ring == (first.network.node_id,)


def test_a_script_that_loses_one_of_two_links_is_not_its_node(home: Home, tmp_path: Path) -> None:
    one, other = Machine(home, tmp_path), Machine(home, tmp_path)
    link(one, other)
    await_master(one, other)
    script = home.add(key=other.key)
    find(script, one.network)
    await_link(script, one.network)
    own = one.network.own_member
    there = (("127.0.0.1",), one.network.port, own.host, own.node_id, "home", "1")
    asyncio.run(examine(script, [Announced(own.process_id, *there)], []))  # over a second link
    script.close()
    await_value(lambda: one.status().peers[1:] == (), lambda: "the script is still linked")
    assert set(one.status().ring) == {one.network.node_id, other.network.node_id}


def test_ranks_follow_the_ring_of_the_nodes(home: Home, tmp_path: Path) -> None:
    machines = sorted(
        (Machine(home, tmp_path) for _ in range(4)), key=lambda one: one.network.node_id
    )
    link(*machines)
    await_master(*machines)
    ids = [machine.network.node_id for machine in machines]
    order = (ids[0], ids[2], ids[1], ids[3])
    fast = zip(order, order[1:] + order[:1], strict=True)
    links = {(min(pair), max(pair)): _link(1e9) for pair in fast}
    links |= {pair: _link(1e6) for pair in [(ids[0], ids[1]), (ids[2], ids[3])]}
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
        future.result(15) for future in [gathering(one).wait_for("g", 4) for one in scripts]
    }
    assert tuple(each.node_id for each in gathering(scripts[0]).members_of(closed)) == order


def teach(network: Network, links: dict[tuple[str, str], Link]) -> None:
    """Have a node say what it has measured."""

    def say() -> None:
        for process_id in network.peers:
            network.send(process_id, Measured(links=links))

    network.do(say)


def _link(bytes_per_second: float) -> Link:
    return Link(bytes_per_second=bytes_per_second, measured_at=1e12, addresses=frozenset())
