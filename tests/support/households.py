"""The node of another machine, in this process, and launchers that reach it over a link."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from coordinator.launchers.mesh import MeshNodes
from coordinator.launchers.remote import CommandLauncher, CommandLaunchers
from muster.cluster.identity import node_id
from muster.cluster.members import MemberNode, Members, read_members, write_members
from muster.contracts.agent import LOOPBACK
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.settings.paths import DataDir
from muster.mesh.orders import serve_orders
from muster.mesh.secret import keep_secret, make_secret, shared_key
from tests.support.launchers import ENVIRON
from tests.support.networks import Home


class Household:
    """The machine that leads, whose files are in `data`, and one that follows, `other`."""

    def __init__(self, root: Path, ending: ExitStack) -> None:
        self.data, self.other = DataDir(root / "leader"), DataDir(root / "follower")
        for each in (self.data, self.other):
            each.root.mkdir(mode=0o700)
        keep_secret(self.data.cluster_key, make_secret())
        secret = shared_key({}, self.data.cluster_key)
        self.network = Home(root, ending).add(secret, key=self.other.node_key)
        self.leader = node_id(self.data.node_key)
        serve_orders(self.network, self.other.root, lambda node: node == self.leader)
        self.place: tuple[str, int] = (LOOPBACK, self.network.port)
        self.write()

    def write(self) -> None:
        leads = MemberNode(
            node_id=self.leader, name="desk", slots=2, cores=1, ram_mb=1024, address=None
        )
        follows = MemberNode(
            node_id=self.network.node_id,
            name="laptop",
            slots=2,
            cores=1,
            ram_mb=1024,
            address=self.place,
        )
        write_members(self.data.nodes, Members(cluster_id="home", nodes=(leads, follows)))

    def launcher(self, epoch: int = 1) -> CommandLauncher:
        """Return the launcher of the machine that follows, for a coordinator of that epoch."""
        nodes = MeshNodes(self.data.nodes, ENVIRON, self.data)
        members = read_members(self.data.nodes)
        assert members is not None
        others = [node for node in members.cluster.nodes if node.transport == "mesh"]
        reached_at = CoordinatorAddress(host=LOOPBACK, port=9, number=(epoch, 1))
        return CommandLaunchers(others, ENVIRON, self.data, reached_at, nodes)[others[0].name]


@contextmanager
def household(root: Path) -> Iterator[Household]:
    with ExitStack() as ending:
        yield Household(root, ending)
