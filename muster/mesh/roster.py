"""The members of the cluster, as the node that leads has them on its disk, and says them to all.

A node that is not linked stays a member: its machine may be off, and agents may run there. It goes
when it says goodbye, which it does when it ends in order, or when a person has it forgotten. Every
member may lead later, so each keeps what was said last.
"""

from collections.abc import Callable
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from muster.cluster.members import (
    MemberNode,
    Members,
    NodeLink,
    read_members,
    term_of,
    write_members,
)
from muster.contracts.agent import LOOPBACK
from muster.contracts.errors import printable
from muster.host.processes import since_boot
from muster.mesh.messages import ClusterRecord, Copy, Hello, Message, Roll
from muster.mesh.network import NAME_LIMIT, Network, Peer
from muster.mesh.node import Node


class Role(StrEnum):
    """What the services of a node do."""

    NONE = "none"
    """This node has no copy of the rows."""
    STANDBY = "standby"
    LEADS = "leads"


FORGET: Final = "forget"
"""The topic of notes that have the node that leads forget a member, by its name or id."""

LAST: Final = 2**62
"""The number of the last row of an epoch that goes on."""

SILENCE_SECONDS: Final = 10.0
"""A member that answers no probe for so long does not count for the majority."""


class Roster:
    """A part of the network of a node, attached after its `Node`."""

    def __init__(
        self,
        network: Network,
        node: Node,
        file: Path,
        on_role: Callable[[Role], None],
        *,
        has_copies: bool = False,
    ) -> None:
        """`on_role` is called in the thread of the network whenever the role changes.

        `has_copies` tells whether others get the rows.
        """
        self._has_copies = has_copies
        self._network = network
        self._node = node
        self._file = file
        self._on_role = on_role
        self._role: Role | None = None
        kept = read_members(file)
        node.is_member = kept is not None
        self._written = kept
        self._said: Roll | None = None
        """By this node, while it leads."""
        self._heard: tuple[str, Roll] | None = None
        """With the id of its sender, which counts while that leads."""
        self._epoch = kept.epoch if kept else 0
        """Of this node, when it led last: its services may write until they have ended."""
        self._suspect = ""
        """The master that was lost; its link may seem to be open for half a minute."""
        self._leader = kept.leader if kept else ""
        """The node that has led with a majority last."""
        self._members = {
            member.node_id: msgspec.structs.replace(member, is_linked=False)
            for member in (kept.nodes if kept else ())
            if member.node_id != network.node_id
        }
        network.readers[FORGET] = lambda _, name: self._forget(name.decode(errors="replace"))
        network.attach(self)

    def receive(self, peer: Peer, message: Message) -> None:
        if peer.node_id == self._suspect:
            self._suspect = ""
        match message:
            case Hello():
                self.renew(peer)
            case Roll():
                self._heard = peer.node_id, message
            case _:
                pass

    def renew(self, peer: Peer) -> None:
        if peer.hello.machine is None or not self._node.is_node(peer):
            return
        own_host, address = peer.own_host, peer.member.address
        self._members[peer.node_id] = _member(peer.node_id, peer.hello, address, own_host)
        if self._said is not None:
            self._network.send(peer.process_id, self._said)

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
        node, copy = self._node, self._network.hello.copy
        if node.leads:
            if self._said is None:
                self._suspect = node.lost_master
            self._lead()
        else:
            if self._said is not None:
                self._said = None
                # Until the services have ended, and the copy has said what it is.
                self._network.say(copy=Copy(is_live=True) if self._has_copies else None)
            if self._heard is not None and copy is not None and copy.is_live:
                self._follow(*self._heard)
        if node.cluster is not None and (node.leads or node.is_member):
            self._write(node.cluster)
        role = Role.LEADS if node.leads else Role.STANDBY if node.is_eligible else Role.NONE
        if role != self._role:
            self._role = role
            self._on_role(role)

    def wake_at(self) -> float:
        return inf

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the members answer, or half of them with the last leader."""
        present = {self._network.node_id, *filter(self._answers, self._members)}
        all_members = 1 + len(self._members)
        is_half = 2 * len(present) == all_members and self._leader in present
        return 2 * len(present) > all_members or is_half

    def _answers(self, node_id: str) -> bool:
        health = self._network.health.peers.get(self._node.process_of(node_id))
        silent_since = since_boot() - SILENCE_SECONDS
        is_silent = health is not None and health.open and health.open[0] < silent_since
        return health is not None and not is_silent and node_id != self._suspect

    def _lead(self) -> None:
        """Say who the members are, and which rows are written from now on."""
        network = self._network
        if has_majority := self.has_majority:
            self._leader = network.node_id
        before = network.hello.copy or Copy()
        self._epoch = self._node.epoch
        newest = term_of(self._epoch, network.node_id), LAST
        majority = newest if has_majority else before.majority
        if (copy := Copy(majority=majority, newest=newest)) != before:
            network.say(copy=copy)
        self._node.is_member, self._heard = True, None
        roll = Roll(nodes=(self._own(), *self._members.values()), has_majority=has_majority)
        if roll != self._said:
            self._said = roll
            for process_id in network.peers:
                network.send(process_id, roll)

    def _follow(self, leader: str, roll: Roll) -> None:
        """Have the members that the node that leads has; its rows are here."""
        if leader != self._node.master:
            return
        self._node.is_member = True
        if roll.has_majority:
            self._leader = leader
        self._members = {
            said.node_id: self._members.get(said.node_id)
            or msgspec.structs.replace(said, is_linked=False)
            for said in roll.nodes
            if said.node_id != self._network.node_id
        }

    def _write(self, record: ClusterRecord) -> None:
        members = Members(
            cluster_id=record.cluster_id,
            epoch=self._epoch,
            has_majority=self.has_majority,
            leader=self._leader,
            has_copies=self._has_copies,
            nodes=(self._own(), *map(self._member, sorted(self._members))),
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
            self._network.warn(f"{self._file} cannot be written ({error}): make room there")
        else:
            self._written = members

    def _member(self, node_id: str) -> MemberNode:
        member = self._members[node_id]
        return msgspec.structs.replace(
            member, is_linked=member.is_linked and node_id != self._suspect
        )

    def _own(self) -> MemberNode:
        return _member(self._network.node_id, self._network.hello, None)

    def _forget(self, name: str) -> bytes:
        """Forget a member that is away; return why that is not done, or nothing."""
        found = [one for one in self._members.values() if name in (one.node_id, one.name)]
        if not self._node.leads:
            return b"this node does not lead"
        if len(found) != 1:
            names = ", ".join(sorted(f"{one.name} ({one.node_id})" for one in found))
            return (f"several nodes have this name: {names}" if found else "no such node").encode()
        if self._member(found[0].node_id).is_linked:
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
