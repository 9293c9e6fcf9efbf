"""The group that this process waits for, or is a member of: a part of the network.

Which of those that wait become one group is decided in `forming`. This module tells it who waits
for the same, and carries its messages.
"""

import secrets
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial
from typing import Final

from muster.host.processes import since_boot
from muster.mesh.forming import Closed, Forming
from muster.mesh.identity import Member
from muster.mesh.messages import Hello, Message, OfGroup, Ring
from muster.mesh.network import Network, Peer

TOKEN_BYTES: Final = 32


class Gathering:
    """Public methods above `receive` are for other threads."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._forming: Forming | None = None
        self._formed: Future[Closed] = Future()
        self._left: dict[str, int] = {}
        """In which turn the members of an earlier group were in it."""
        self._unlinked: set[str] = set()
        """Those of them that this process has not met yet."""
        self._ring: tuple[str, ...] = ()
        """Of the nodes of the household, as the node of this machine has said it."""
        network.attach(self)

    def wait_for(self, group: str, size: int | None, after: Collection[str] = ()) -> Future[Closed]:
        """Begin to wait for a group, and return what becomes it.

        `after` are the members of an earlier group of this name.
        """

        def begin() -> Future[Closed]:
            network = self._network
            self._formed = Future()
            self._unlinked.clear()
            living = [each for each in after if each in network.peers]
            make_token = partial(secrets.token_bytes, TOKEN_BYTES)
            self._forming = Forming(
                network.own_id, size, make_token, since_boot(), awaited=living, order=self._order
            )
            network.say(group=group, size=size)
            for peer in network.peers.values():
                self._compare(peer)
            network.act()
            return self._formed

        return self._network.do(begin)

    def members_of(self, closed: Closed) -> list[Member]:
        """Return the members in the order of their ranks. Raises KeyError if one is gone."""

        def order() -> list[Member]:
            peers = self._network.peers
            own = self._network.own_member
            return [
                own if each == own.process_id else peers[each].member for each in closed.members
            ]

        return self._network.do(order)

    def departed(self, closed: Closed) -> set[str]:
        """Return the other members that are not linked any more, or have begun to meet anew."""

        def look() -> set[str]:
            peers = self._network.peers
            together = {each for each, peer in peers.items() if not self._waits_now(peer)}
            return {*closed.members} - together - {self._network.own_id}

        return self._network.do(look)

    def living_members(self) -> list[Member]:
        """Return the linked members of a group of the awaited name that lives already."""

        def look() -> list[Member]:
            full = self._forming.full if self._forming is not None else ()
            peers = self._network.peers
            return [peers[one].member for one in full if one in peers]

        return self._network.do(look)

    def stop_waiting(self) -> None:
        """Wait for no group any more."""

        def end() -> None:
            self._forming = None
            self._network.say(group=None, size=None)

        self._network.do(end)

    # The part

    def receive(self, peer: Peer, message: Message) -> None:
        match message:
            case Hello():
                if peer.process_id in self._unlinked:
                    self._unlinked.remove(peer.process_id)
                    self._left[peer.process_id] = peer.hello.turn
                self._compare(peer)
            case OfGroup(group=group, message=said) if self._forming:
                # Not the last words of an earlier group.
                if group == self._network.hello.group and self._waits_now(peer):
                    self._forming.receive(peer.process_id, said, since_boot())
            case Ring(nodes=nodes) if peer.node_id == self._network.node_id:
                self._ring = nodes

    def renew(self, peer: Peer) -> None:
        if self._forming is not None:
            self._forming.lose(peer.process_id, since_boot(), is_renewed=True)
        self._compare(peer)

    def lose(self, peer: Peer) -> None:
        if self._forming is not None:
            self._forming.lose(peer.process_id, since_boot())

    def wake_at(self) -> float:
        return float("inf") if self._forming is None else self._forming.wake_at()

    def check(self) -> None:
        group = self._network.hello.group
        if self._forming is None or group is None:
            return
        self._forming.check(since_boot())
        due, self._forming.due = self._forming.due, []
        for process_id, message in due:
            self._network.send(process_id, OfGroup(group=group, message=message))
        closed = self._forming.closed
        if closed is not None and not self._formed.done():
            # Now: a member may wait for the next one before this one's thread has seen it.
            turns = {each: peer.hello.turn for each, peer in self._network.peers.items()}
            self._left |= {each: turns[each] for each in closed.members if each in turns}
            self._unlinked = {*closed.members} - {*turns, self._network.own_id}
            self._formed.set_result(closed)

    def _compare(self, peer: Peer) -> None:
        """Meet a peer that waits for the same group, or lose one that does no more."""
        if self._forming is None:
            return
        now, process_id = since_boot(), peer.process_id
        hello, own = peer.hello, self._network.hello
        sizes = {hello.size, own.size} - {None}
        if hello.group != own.group or len(sizes) > 1:
            if hello.group == own.group:
                self._network.warn(
                    f"{peer.member} has asked for {hello.size} in the group {hello.group!r}, and "
                    f"this process for {own.size}: give all the same number of peers"
                )
            self._forming.lose(process_id, now)
        elif self._waits_now(peer):
            self._forming.meet(process_id, now, is_after=hello.size is None)
        elif (closed := self._forming.closed) and process_id in closed.members:
            # Its link is new: the first word of this may be lost.
            self._network.send(process_id, OfGroup(group=hello.group or "", message=closed))

    def _waits_now(self, peer: Peer) -> bool:
        return peer.hello.turn > self._left.get(peer.process_id, 0)

    def _order(self, members: Collection[str]) -> tuple[str, ...]:
        """Return members by rank: as the ring goes, if all of their machines are in it."""
        network = self._network
        nodes = {each: peer.node_id for each, peer in network.peers.items()}
        nodes[network.own_id] = network.node_id
        has_ring = all(nodes[each] in self._ring for each in members)
        places = {node: place for place, node in enumerate(self._ring if has_ring else ())}
        return tuple(sorted(members, key=lambda one: (places.get(nodes[one], 0), nodes[one], one)))
