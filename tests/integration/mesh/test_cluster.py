"""Clusters of nodes over real sockets: who founds them, who belongs to them."""

from pathlib import Path

from muster.cluster.members import read_members
from muster.mesh.founding import Founding
from muster.mesh.messages import Copy
from muster.mesh.network import Network
from muster.mesh.node import Node
from muster.mesh.roster import Role, Roster
from tests.support.installation import await_value
from tests.support.networks import Home, find


class Machine:
    """A node of a cluster, and what is on its disk."""

    def __init__(self, home: Home, directory: Path, *, has_mark: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.home, self.directory, self.has_mark = home, directory, has_mark
        self.roles: list[Role] = []
        self.network = self.start()

    def start(self) -> Network:
        self.roles.clear()
        network = self.home.add(key=self.directory / "node.key")
        record = self.directory / "cluster.json"
        founding = Founding(record, has_mark=self.has_mark, has_secret_file=True)
        file = self.directory / "election.json"
        self.node = Node(network, file, lambda _: None, founding=founding, slots=2)
        self.roster = Roster(network, self.node, self.nodes_file, self.roles.append)
        return network

    @property
    def nodes_file(self) -> Path:
        return self.directory / "nodes.json"

    def members(self) -> dict[str, bool]:
        """Return which nodes are members, and whether each is linked."""
        members = read_members(self.nodes_file)
        return {each.node_id: each.is_linked for each in members.nodes} if members else {}

    def await_role(self, role: Role) -> None:
        await_value(lambda: self.roles[-1:] == [role], lambda: f"{self.network.do(self.status)}")

    def status(self) -> str:
        return str((self.roles, self.node.status()))

    def restart(self) -> None:
        self.network.close()
        self.network = self.start()


def link(*machines: Machine) -> None:
    for one in machines:
        for other in machines:
            if one is not other:
                find(one.network, other.network)


def formed(home: Home, directory: Path, count: int = 3) -> list[Machine]:
    """Return the founder of a cluster, then its other nodes."""
    made = [Machine(home, directory / f"{n}", has_mark=n == 0) for n in range(count)]
    link(*made)
    made[0].await_role(Role.LEADS)
    for other in made[1:]:
        other.await_role(Role.NONE)
    return made


def test_others_join_and_no_other_leads_after_its_end(home: Home, tmp_path: Path) -> None:
    founder, *others = formed(home, tmp_path)
    everyone = {each.network.node_id: True for each in (founder, *others)}
    await_value(lambda: founder.members() == everyone, lambda: f"{founder.members()}")
    founder.network.close()
    masters = lambda: {each.node.master for each in others}  # noqa: E731
    await_value(lambda: masters() == {None}, lambda: f"{masters()}")
    assert [each.roles for each in others] == [[Role.NONE]] * 2, "services that never lead"
    founder.network = founder.start()
    link(founder, *others)
    await_value(lambda: masters() == {founder.network.node_id}, lambda: f"{masters()}")


def test_a_machine_that_is_off_stays_a_member(home: Home, tmp_path: Path) -> None:
    founder, other = formed(home, tmp_path, 2)
    own, node_id = founder.network.node_id, other.network.node_id
    founder.restart()  # it knows the other from its disk
    founder.await_role(Role.LEADS)
    unlinked = {own: True, node_id: False}
    await_value(lambda: founder.members() == unlinked, lambda: f"{founder.members()}")
    link(founder, other)
    await_value(lambda: founder.members()[node_id], lambda: f"{founder.members()}")
    other.network.close()  # with a goodbye
    await_value(lambda: founder.members() == {own: True}, lambda: f"{founder.members()}")


def test_two_clusters_have_no_part_in_each_other(home: Home, tmp_path: Path) -> None:
    one, other = (formed(home, tmp_path / name, 1)[0] for name in ("a", "b"))
    link(one, other)
    await_value(lambda: one.network.warnings, one.status)
    await_value(lambda: other.network.warnings, other.status)
    assert "muster node leave" in next(iter(one.network.warnings))
    assert [one.roles[-1], other.roles[-1]] == [Role.LEADS] * 2
    assert [each.members() for each in (one, other)] == [
        {each.network.node_id: True} for each in (one, other)
    ]


def test_a_machine_with_earlier_jobs_founds_a_cluster(home: Home, tmp_path: Path) -> None:
    founder = Machine(home, tmp_path, has_mark=True)
    founder.network.do(lambda: founder.network.say(copy=Copy()))
    founder.await_role(Role.LEADS)


def test_a_follower_has_the_members_but_not_the_epoch(home: Home, tmp_path: Path) -> None:
    founder, other = formed(home, tmp_path, 2)
    other.network.do(lambda: other.network.say(copy=Copy(is_live=True)))
    await_value(lambda: other.members().keys() == founder.members().keys(), other.status)
    kept = read_members(other.nodes_file)
    assert kept is not None
    assert kept.epoch == 0, "rows that its services write late are of its own leadership"


def test_a_node_leads_once_its_rows_are_known(home: Home, tmp_path: Path) -> None:
    founder = Machine(home, tmp_path, has_mark=True)
    founder.node.is_copy_known = False
    await_value(lambda: founder.node.status().state == "campaigning", founder.status)
    assert founder.roles == [Role.STANDBY]
    founder.node.is_copy_known = True
    founder.await_role(Role.LEADS)
