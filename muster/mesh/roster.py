"""The members of the cluster, as the node that leads has them on its disk.

A node that is not linked stays a member: its machine may be off, and agents may run there. It goes
when it says goodbye, which it does when it ends in order, or when a person has it forgotten.
"""

from collections.abc import Callable
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from muster.cluster.members import MemberNode, Members, NodeLink, read_members, write_members
from muster.contracts.agent import LOOPBACK
from muster.contracts.errors import printable
from muster.mesh.messages import ClusterRecord, Hello, Message
from muster.mesh.network import NAME_LIMIT, Network, Peer
from muster.mesh.node import Node


class Role(StrEnum):
    """What the services of a node do."""

    NONE = "none"
    """Another node has the rows, or will have them."""
    STANDBY = "standby"
    LEADS = "leads"


FORGET: Final = "forget"
"""The topic of notes that have the node that leads forget a member, by its name or id."""


class Roster:
    """A part of the network of a node, attached after its `Node`."""

    def __init__(
        self,
        network: Network,
        node: Node,
        file: Path,
        on_role: Callable[[Role], None],
    ) -> None:
        """`on_role` is called in the thread of the network whenever the role changes."""
        self._network = network
        self._node = node
        self._file = file
        self._on_role = on_role
        self._role: Role | None = None
        kept = read_members(file)
        self._written = kept
        self._members = {
            member.node_id: msgspec.structs.replace(member, is_linked=False)
            for member in (kept.nodes if kept else ())
            if member.node_id != network.node_id
        }
        network.readers[FORGET] = lambda _, name: self._forget(name.decode(errors="replace"))
        network.attach(self)

    def receive(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Hello):
            self._note(peer)

    def renew(self, peer: Peer) -> None:
        self._note(peer)

    def lose(self, peer: Peer) -> None:
        member = self._members.get(peer.node_id)
        is_script = peer.hello.machine is None
        if member is None or is_script or self._node.process_of(peer.node_id):
            return  # another process of its machine is linked
        if peer.has_left:
            del self._members[peer.node_id]
        else:
            self._members[peer.node_id] = msgspec.structs.replace(member, is_linked=False)

    def check(self) -> None:
        record, founding = self._node.cluster, self._node.founding
        if self._node.leads and record is not None:
            self._write(record)
        may_lead = founding is None or founding.may_lead(self._network.node_id, 0)
        role = Role.LEADS if self._node.leads else Role.STANDBY if may_lead else Role.NONE
        if role != self._role:
            self._role = role
            self._on_role(role)

    def wake_at(self) -> float:
        return inf

    def _write(self, record: ClusterRecord) -> None:
        network = self._network
        own = _member(network.node_id, network.hello, None)
        members = Members(
            cluster_id=record.cluster_id,
            epoch=self._node.epoch,
            nodes=(own, *(self._members[each] for each in sorted(self._members))),
            ring=self._node.links.ring,
            links=tuple(
                NodeLink(nodes=link.nodes, bytes_per_second=link.bytes_per_second)
                for _, link in sorted(self._node.links.known.items())
            ),
        )
        if members == self._written:
            return
        try:
            write_members(self._file, members)
        except OSError as error:
            network.warn(f"{self._file} cannot be written ({error}): make room there")
        else:
            self._written = members

    def _note(self, peer: Peer) -> None:
        node_id, hello = peer.node_id, peer.hello
        if hello.machine is None or not self._node.is_node(peer):
            return
        self._members[node_id] = _member(node_id, hello, peer.member.address, peer.own_host)

    def _forget(self, name: str) -> bytes:
        """Forget a member that is away; return why that is not done, or nothing."""
        found = [one for one in self._members.values() if name in (one.node_id, one.name)]
        if not self._node.leads:
            return b"this node does not lead"
        if len(found) != 1:
            names = ", ".join(sorted(f"{one.name} ({one.node_id})" for one in found))
            return (f"several nodes have this name: {names}" if found else "no such node").encode()
        if found[0].is_linked:
            return b"it is linked: end it there with Ctrl-C, or muster node leave"
        del self._members[found[0].node_id]
        self._network.act()
        return b""


def _member(
    node_id: str, hello: Hello, address: tuple[str, int] | None, leader_host: str = LOOPBACK
) -> MemberNode:
    assert hello.machine is not None  # noqa: S101  it is a node's
    return MemberNode(
        node_id=node_id,
        name=printable(hello.host)[:NAME_LIMIT],
        slots=max(hello.machine.slots, 1),
        cores=hello.machine.cores,
        ram_mb=hello.machine.ram_mb,
        address=address,
        leader_host=leader_host,
        is_leaving=hello.is_leaving,
    )
