"""The nodes of a household, as the node of this machine tells its services.

It writes a file whenever one comes, goes or has another address; the services read it anew.
"""

import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgspec

from muster.cluster.description import Cluster, ClusterNode, cluster_of_service
from muster.contracts.agent import LOOPBACK
from muster.contracts.errors import InvalidDescription, InvalidEnvironment
from muster.contracts.settings.services import CLUSTER, ServiceSettings
from muster.host.files import file_identity, replace_private


class MemberNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node_id: str
    name: str
    """Of its machine, for people."""
    slots: int
    cores: int
    ram_mb: int
    address: tuple[str, int] | None
    """Where it listens, or did so last; None for the node that leads."""
    leader_host: str = LOOPBACK
    """The address of the leading machine that this node reaches."""
    is_linked: bool = True
    is_leaving: bool = False


class NodeLink(msgspec.Struct, frozen=True, kw_only=True):
    """How fast two nodes sent to each other."""

    nodes: tuple[str, str]
    bytes_per_second: float


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds; without a household nothing."""

    cluster_id: str = ""
    epoch: int = 0
    """When this node led last; each leader has a greater one than those that it has heard of."""
    has_majority: bool = True
    """Whether more than half of the members answer, or half of them with the last leader."""
    leader: str = ""
    """The id of the node that has led with a majority last."""
    has_copies: bool = False
    """Whether other nodes get the rows."""
    nodes: tuple[MemberNode, ...] = ()
    ring: tuple[str, ...] = ()
    """The order in which groups of several nodes send to each other."""
    links: tuple[NodeLink, ...] = ()

    @property
    def cluster(self) -> Cluster:
        """The nodes as placement sees them. Rows name a node by its id, which outlives its name."""
        return Cluster(nodes=tuple(map(_described, self.nodes)))

    @property
    def names(self) -> dict[str, str]:
        """What people call each node: its machine, with the id where two have one name."""
        counts = Counter(node.name for node in self.nodes)
        return {
            node.node_id: node.name if counts[node.name] == 1 else f"{node.name} ({node.node_id})"
            for node in self.nodes
        }

    @property
    def absences(self) -> dict[str, str]:
        """Why no rank is to be started on some nodes, by their ids."""
        names = self.names
        return {
            node.node_id: f"{names[node.node_id]} {'leaves' if node.is_linked else 'is not linked'}"
            for node in self.nodes
            if node.is_leaving or not node.is_linked
        }

    @property
    def term(self) -> int:
        """The number of this leadership: see `term_of`; this machine is the first of the nodes."""
        return term_of(self.epoch, self.nodes[0].node_id) if self.nodes else 0

    @property
    def minority(self) -> str:
        """Why only jobs with the same bits everywhere may run; "" with a majority."""
        if self.has_majority or not self.has_copies:
            return ""
        names = self.names
        away = ", ".join(names[node.node_id] for node in self.nodes if not node.is_linked)
        return (
            "waits for a majority of the machines, as others may run it, too: "
            f"{away or 'some of them'} cannot be reached; start muster node there, or type "
            "muster node forget NAME"
        )

    def find(self, node_id: str) -> MemberNode | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)


def term_of(epoch: int, node_id: str) -> int:
    """Return the number of a leadership, 0 without an election. Leases take the next 65,536.

    No node that was elected earlier or later has one of these, however old its rows are; nor one
    that the other part of a divided cluster elected in the same epoch, but for a pair in 65,536.
    """
    return epoch << 32 | (zlib.crc32(node_id.encode()) & 0xFFFF) << 16 if epoch else 0


def write_members(file: Path, members: Members) -> None:
    """Raises OSError."""
    replace_private(file, msgspec.json.encode(members))


def read_members(file: Path) -> Members | None:
    """Return what the file holds; None if it is missing or damaged."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=Members)
    return None


class ServiceCluster:
    """The machines of a service. Those of a household are read anew whenever their file changes."""

    def __init__(self, settings: ServiceSettings, node: str) -> None:
        """`node` is the id of our own. Raises `InvalidDescription` and `InvalidEnvironment`."""
        self._file = settings.nodes
        self._seen: tuple[int, int] | None = None
        self._members = Members()
        if self._file is None:
            self._cluster = cluster_of_service(settings.cluster, node, settings.slots)
        elif settings.cluster is not None:
            wanted = "used beside `muster node`, whose nodes are the cluster"
            raise InvalidEnvironment(CLUSTER, str(settings.cluster), wanted, "unset it")
        elif not self.members.nodes:
            raise InvalidDescription(f"{self._file} cannot be read: start `muster node` again")

    @property
    def members(self) -> Members:
        """The nodes of a household that there are now."""
        self()
        return self._members

    def __call__(self) -> Cluster:
        """Return the machines that there are now."""
        if self._file is not None and (seen := file_identity(self._file)) != self._seen:
            if (members := read_members(self._file)) is not None:
                self._cluster, self._members = members.cluster, members
            self._seen = seen
        return self._cluster


def _described(node: MemberNode) -> ClusterNode:
    return ClusterNode(
        name=node.node_id,
        host=node.leader_host if node.address is None else node.address[0],
        transport="local" if node.address is None else "mesh",
        slots=node.slots,
        cpu_cores=node.cores,
        ram_mb=node.ram_mb,
        max_adapters=node.slots,
    )
