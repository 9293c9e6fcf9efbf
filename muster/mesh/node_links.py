"""How fast the links between nodes are, and in which order the nodes make a ring.

What follows from the figures is decided in `topology`; this module measures and tells.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Final

from muster.contracts.errors import AuthenticationFailed, WireError
from muster.host.processes import since_boot
from muster.mesh import bandwidth
from muster.mesh.messages import Measured, Ring
from muster.mesh.network import Network, Peer
from muster.mesh.topology import Link, is_due, ring

SETTLE_SECONDS: Final = 5.0
"""From the meeting of two nodes to the measurement of their link."""

RETRY_SECONDS: Final = 60.0
"""After a measurement that failed."""

ORDER_SECONDS: Final = 1.0
"""From one ring to the next: many links are measured at once, and a ring takes a tenth of this."""


class NodeLinks:
    """What a node does with the links between nodes, in the thread of its network."""

    def __init__(self, network: Network, nodes: Mapping[str, str]) -> None:
        """`nodes` has the process of each linked node, by the id of the node."""
        self._network = network
        self._nodes = nodes
        self._measure_at: dict[str, float] = {}
        self._is_measuring = False
        self._ordered_at = float("-inf")
        self.known: dict[tuple[str, str], Link] = {}
        self.ring: tuple[str, ...] = (network.node_id,)
        self.is_ring_old = False
        """Whether nodes or links have changed since the ring was formed."""

    def meet(self, peer: Peer, now: float) -> None:
        """Tell a node what is known, and measure the link with it soon."""
        self._measure_at[peer.node_id] = now + SETTLE_SECONDS
        self._network.send(peer.process_id, Measured(links=tuple(self.known.values())))
        self.is_ring_old = True

    def greet_script(self, peer: Peer) -> None:
        if peer.node_id == self._network.node_id:
            self._network.send(peer.process_id, Ring(nodes=self.ring))

    def learn(self, links: Iterable[Link]) -> None:
        linked = {self._network.node_id, *self._nodes}
        for link in links:
            known = self.known.get(link.nodes)
            is_new = known is None or link.measured_at > known.measured_at
            if is_new and linked.issuperset(link.nodes):  # each node says its own when it is met
                self.known[link.nodes] = link
                self.is_ring_old = True

    def check(self, now: float) -> None:
        """Do what is due."""
        self._order(now)
        self._begin_to_measure(now)

    def _order(self, now: float) -> None:
        """Form the ring anew if that is due, and tell the scripts of this machine."""
        if not self.is_ring_old or now < self._ordered_at + ORDER_SECONDS:
            return
        self.is_ring_old, self._ordered_at = False, now
        speeds = {pair: link.bytes_per_second for pair, link in self.known.items()}
        before, self.ring = self.ring, ring([*self._nodes, self._network.node_id], speeds)
        if self.ring != before:
            for peer in self._network.peers.values():
                if peer.hello.machine is None:
                    self.greet_script(peer)

    def _begin_to_measure(self, now: float) -> None:
        """Measure one link at a time, while no script of both machines is in a group."""
        if self._is_measuring:
            return
        peers, own = self._network.peers, self._network.node_id
        busy = {peer.node_id for peer in peers.values() if peer.hello.group is not None}
        for node, process_id in self._nodes.items():
            peer, last = peers[process_id], self.known.get((own, node))
            is_idle = peer.links and now >= self._measure_at[node] and not busy & {own, node}
            if is_idle and is_due(own, node, last, peer.ends, time.time()):
                self._is_measuring = True
                self._network.run(self._measure(peer))
                return

    async def _measure(self, peer: Peer) -> None:
        node, ends = peer.node_id, peer.ends
        self._measure_at[node] = since_boot() + RETRY_SECONDS
        try:
            speed = await bandwidth.measure(peer.member.address, self._network.identity)
        except (OSError, EOFError, AuthenticationFailed, WireError):
            return  # the link is going, or slow: it is tried again
        finally:
            self._is_measuring = False
        pair, now = (self._network.node_id, node), time.time()
        links = (Link(nodes=pair, bytes_per_second=speed, measured_at=now, addresses=ends),)
        self.learn(links)
        for process_id in self._nodes.values():
            self._network.send(process_id, Measured(links=links))
