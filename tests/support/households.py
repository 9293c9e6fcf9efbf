"""Nodes of other machines: in this process, with launchers that reach it, and on test hosts.

As a program it is the node of a test host, without a mesh: it takes orders of one other node.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec.structs import replace

from coordinator.launchers.mesh import MeshNodes
from coordinator.launchers.remote import CommandLauncher, CommandLaunchers
from muster.cluster.identity import node_id
from muster.cluster.members import MemberNode, Members, read_members, write_members
from muster.contracts.agent import LOOPBACK
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.settings.paths import DataDir
from muster.links.serving import listen
from muster.mesh.health import PRESETS
from muster.mesh.identity import mesh_identity
from muster.mesh.network import Network
from muster.mesh.orders import serve_orders
from muster.mesh.secret import KEY_VARIABLE, keep_secret, make_secret, shared_key
from tests.support.clusters import ClusterInstallation
from tests.support.hosts import Host, hosts
from tests.support.installation import write_small_dataset
from tests.support.launchers import ENVIRON
from tests.support.networks import Home

PORT = 52416
KEY = "a secret of this test alone"


def member(node: str, name: str, address: tuple[str, int] | None = None) -> MemberNode:
    return MemberNode(node_id=node, name=name, slots=2, cores=1, ram_mb=1024, address=address)


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
        nodes = member(self.leader, "desk"), member(self.network.node_id, "laptop", self.place)
        write_members(self.data.nodes, Members(cluster_id="home", nodes=nodes))

    def launcher(self) -> CommandLauncher:
        """Return the launcher of the machine that follows."""
        nodes = MeshNodes(self.data.nodes, ENVIRON, self.data)
        members = read_members(self.data.nodes)
        assert members is not None
        others = [node for node in members.cluster.nodes if node.transport == "mesh"]
        reached_at = CoordinatorAddress(host=LOOPBACK, port=9, number=(1, 1))
        return CommandLaunchers(others, ENVIRON, self.data, reached_at, nodes)[others[0].name]


@contextmanager
def household(root: Path) -> Iterator[Household]:
    with ExitStack() as ending:
        yield Household(root, ending)


class HomeInstallation(ClusterInstallation):
    """Services over nodes of a household, each with directories of its own."""

    def __init__(self, root: Path, machines: Sequence[Host]) -> None:
        data = DataDir(machines[0].directory / "data")
        data.root.mkdir(mode=0o700)
        self.leader = node_id(data.node_key)
        super().__init__(root, machines, MUSTER_AGENT_ADDRESS="")
        self.nodes = root / "nodes.json"
        self.set_members(len(machines))
        settings = {"MUSTER_CLUSTER": "", "MUSTER_NODES": str(self.nodes), KEY_VARIABLE: KEY}
        for environment in (self.environment, self.api.environment):
            environment |= {**settings, "HOME": str(self.home(machines[0]))}

    def home(self, host: Host) -> Path:
        """Return the home directory of a host as it sees it."""
        return host.local / f"home-{host.number}"

    def set_members(self, count: int) -> None:
        """Write down that the first machines are the nodes."""
        first, *others = self.machines[:count]
        nodes = [replace(member(self.leader, first.name), leader_host=first.address)]
        for host in others:
            file = DataDir(host.directory / "home-data" / str(host.number)).node_key
            node = member(node_id(file), host.name, (host.address, PORT))
            nodes.append(replace(node, leader_host=first.address))
        write_members(self.nodes, Members(cluster_id="home", nodes=tuple(nodes)))

    def boot(self, host: Host) -> None:
        """Start the node of a host; outside its home are copies of what the API looks at."""
        data = host.local / "home-data" / str(host.number)
        for base in (host.directory, host.local):
            write_small_dataset(base / f"home-{host.number}" / "shards")
        if host is self.machines[0]:
            return
        (host.directory / "home-data" / str(host.number)).mkdir(parents=True)
        environment = {**os.environ, "HOME": str(self.home(host)), KEY_VARIABLE: KEY}
        words = ["-m", "tests.support.households", str(data), self.leader]
        host.start([sys.executable, *words], environment, cwd=Path.cwd())


@contextmanager
def home_cluster(root: Path, count: int = 3) -> Iterator[HomeInstallation]:
    with hosts(count, root) as machines, HomeInstallation(root, machines) as installation:
        yield installation


def main(data_dir: str, leader: str) -> None:
    data = DataDir(Path(data_dir))
    secret = shared_key(os.environ, data.cluster_key)
    own = mesh_identity("home", data.node_key, secret)
    network = Network(own, listen("0.0.0.0", PORT), PRESETS["default"])  # noqa: S104
    serve_orders(network, data.root, lambda node: node == leader)
    network.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
