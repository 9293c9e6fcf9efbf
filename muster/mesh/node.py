"""The node of this machine: who leads the household, and how fast the links between nodes are.

A part of the network. What follows is decided in `election` and `topology`; this module stores,
sends and measures. Its process has another id at each start, so nodes are known by the key of
their machine.
"""

import os
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from random import SystemRandom
from typing import Final

import msgspec

from muster.checkpoints.local import LocalFileSystem, replace_file
from muster.contracts.errors import AuthenticationFailed, WireError
from muster.host.clock import since_boot
from muster.host.gpus import total_memory_mb
from muster.host.limits import memory_limits, usable_processors
from muster.host.private import UnusableDirectory
from muster.mesh import bandwidth
from muster.mesh.election import (
    CLOCK_LIMIT_SECONDS,
    Due,
    Election,
    EventKind,
    Stored,
    is_clock_credible,
)
from muster.mesh.messages import Hello, Measured, Message, OfElection, Ring
from muster.mesh.network import Network, Peer
from muster.mesh.topology import Link, Machine, is_due, ring

STATUS: Final = "status"
"""The topic of notes that ask a node for its `Status`."""

SLEEP_SECONDS: Final = 15.0
"""After a longer stop a node begins a new session: others have removed it, or will."""

SETTLE_SECONDS: Final = 5.0
"""From the meeting of two nodes to the measurement of their link."""

RETRY_SECONDS: Final = 60.0
"""After a measurement that failed."""

EVENT_LIMIT: Final = 64


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is linked to a node."""

    host: str
    node_id: str
    process_id: str
    address: str
    is_node: bool
    group: str | None
    size: int | None
    condition: str
    latency_ms: float | None
    """The moving average of round trips."""
    uptime_ratio: float


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured between two nodes."""

    nodes: tuple[str, str]
    bytes_per_second: float


class Event(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    """Seconds since 1970."""
    text: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What a node knows of its household."""

    node_id: str
    host: str
    state: str
    master: str | None
    """The id of the node that leads."""
    epoch: int
    may_lead: bool
    ring: tuple[str, ...]
    peers: tuple[PeerStatus, ...]
    links: tuple[LinkStatus, ...]
    events: tuple[Event, ...]
    counters: Mapping[str, float]
    warnings: tuple[str, ...]


class Node:
    """All that it does, it does in the thread of its network."""

    def __init__(self, network: Network, file: Path, tell: Callable[[str], None]) -> None:
        """`file` keeps session and epoch, and `tell` gets a line for people at each event.

        Raises `UnusableDirectory` if the file cannot be written.
        """
        self._network = network
        self._file = file
        self._tell = tell
        self._chance = SystemRandom()
        self._nodes: dict[str, str] = {}
        """The process of each linked node, by the id of the node."""
        self._clocks: dict[str, float] = {}
        """The time of day at each linked node, when this machine was started."""
        self._measure_at: dict[str, float] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._is_measuring = False
        self._ring: tuple[str, ...] = (network.node_id,)
        self._events: deque[Event] = deque(maxlen=EVENT_LIMIT)
        self._counts: Counter[str] = Counter()
        self._distant: dict[str, str] = {}
        """The warning about the clock of a node, by its id."""
        self._told: set[str] = set()
        """Warnings that were given to `tell`."""
        self._unsaved: Stored | None = None
        self._full = ""
        """The warning about the disk."""
        self._awake_at = since_boot()
        self._stored = self._read()
        self._election = self._new_session()
        due = self._election.take()
        self._store(due)
        if self._unsaved is not None:
            raise UnusableDirectory(
                f"{file} cannot be written, and a node that forgets its session is not believed: "
                "make room there, or set MUSTER_DATA_DIR"
            )
        network.readers[STATUS] = lambda asker, _: msgspec.json.encode(self.status(asker))
        network.attach(self)
        machine = _machine()
        network.do(lambda: network.say(machine=machine))

    def status(self, asker: str = "") -> Status:
        """Return what this node knows, without the process that asks."""
        network, election = self._network, self._election
        peers = [peer for peer in network.peers.values() if peer.process_id != asker]
        return Status(
            node_id=network.node_id,
            host=network.hello.host,
            state=election.state,
            master=election.master,
            epoch=election.epoch,
            may_lead=self._may_lead(),
            ring=self._ring,
            peers=tuple(map(self._peer_status, peers)),
            links=tuple(
                LinkStatus(nodes=pair, bytes_per_second=link.bytes_per_second)
                for pair, link in sorted(self._links.items())
            ),
            events=tuple(self._events),
            counters=network.counters() | self._counts,
            warnings=tuple(network.warnings),
        )

    # The part

    def meet(self, peer: Peer) -> None:
        """See `receive`: the hello says whether it is a node."""

    def receive(self, peer: Peer, message: Message) -> None:
        now = self._wake()
        is_node = self._is_node(peer)
        match message:
            case Hello(machine=None):
                self._greet_script(peer)
            case Hello():
                self._greet_node(peer, now)
            case OfElection(message=said) if is_node:
                self._election.receive(peer.node_id, said, now)
            case Measured(links=links) if is_node:
                self._learn(links)

    def renew(self, peer: Peer) -> None:
        if self._is_node(peer):
            del self._nodes[peer.node_id]
            self._greet_node(peer, self._wake())
        else:
            self._greet_script(peer)

    def lose(self, peer: Peer) -> None:
        if self._is_node(peer):
            how = "has left" if peer.has_left else "is gone"
            self._note(f"{peer.member.host} ({peer.node_id}) {how}")
            del self._nodes[peer.node_id], self._clocks[peer.node_id]
            self._election.lose(peer.node_id, self._wake())
            self._order()

    def check(self) -> None:
        now = self._wake()
        self._election.permit(now, may_lead=self._may_lead())
        self._election.check(now)
        due = self._election.take()
        self._store(due)
        if self._unsaved is None:
            for node, message in due.messages:
                self._network.send(self._nodes.get(node, ""), OfElection(message=message))
            for event in due.events:
                self._counts[f"election.{event.kind}"] += 1
                name = self._name(event.node)
                self._note(_SENTENCES[event.kind].format(node=name, epoch=event.epoch))
        changes, self._network.health.events = self._network.health.events, []
        for change in changes:
            self._counts[f"peers.{change.condition}"] += 1
            peer = self._network.peers.get(change.peer)
            if peer is not None and self._is_node(peer):
                self._note(f"{self._name(peer.node_id)} is {change.condition}")
        for text in [text for text in self._network.warnings if text not in self._told]:
            self._tell(text)
        self._told = {*self._network.warnings}
        self._begin_to_measure(now)

    def wake_at(self) -> float:
        return self._election.wake_at()

    # Sessions and clocks

    def _wake(self) -> float:
        """Return the time; begin a new session if this process, or its machine, was stopped."""
        now = since_boot()
        if now > self._awake_at + SLEEP_SECONDS:
            self._note(
                f"this node was stopped for {now - self._awake_at:.0f} s: a new session begins"
            )
            self._election = self._new_session()
            for node in self._nodes:
                self._election.meet(node, now)
        self._awake_at = now
        return now

    def _new_session(self) -> Election:
        own = self._network.node_id
        now = since_boot()
        return Election(own, self._stored, time.time(), now, self._chance)

    def _read(self) -> Stored:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Stored)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            self._note(
                f"{self._file} cannot be read ({error}): peers say which session was the last"
            )
        return Stored()

    def _store(self, due: Due) -> None:
        """Make session and epoch durable; until that is done nothing may be sent."""
        self._unsaved = due.stored or self._unsaved
        if self._unsaved is None:
            return
        try:
            content = msgspec.json.encode(self._unsaved)
            replace_file(LocalFileSystem(), str(self._file), content)
        except OSError as error:
            self._full = (
                f"{self._file} cannot be written ({error.strerror}): make room there; until "
                "then this node does not lead, and says nothing"
            )
            self._network.warn(self._full)
        else:
            self._stored, self._unsaved = self._unsaved, None
            self._network.warnings.pop(self._full, None)

    def _may_lead(self) -> bool:
        """Whether this node has a disk to remember by, and a clock that others agree with."""
        own = time.time() - since_boot()
        offsets = {node: clock - own for node, clock in self._clocks.items()}
        distant = {node for node, offset in offsets.items() if abs(offset) > CLOCK_LIMIT_SECONDS}
        for node in self._distant.keys() - distant:
            self._network.warnings.pop(self._distant.pop(node), None)
        for node in distant - self._distant.keys():
            hours = abs(offsets[node]) / 3600
            way = "ahead of" if offsets[node] > 0 else "behind"
            self._distant[node] = (
                f"the clock of {self._name(node)} is {hours:.0f} hours {way} the one of this "
                "machine: set both, by NTP"
            )
            self._network.warn(self._distant[node])
        return self._unsaved is None and is_clock_credible(offsets.values())

    # Nodes and links

    def _greet_node(self, peer: Peer, now: float) -> None:
        node, network = peer.node_id, self._network
        if node == network.node_id:
            network.warn(f"{peer.member} has the key of this node: remove node.key there")
            return
        self._clocks[node] = peer.hello.clock - now
        if self._is_node(peer):
            return
        self._nodes[node] = peer.process_id
        self._measure_at[node] = now + SETTLE_SECONDS
        network.send(peer.process_id, Measured(links=self._links))
        self._election.meet(node, now)
        self._order()

    def _greet_script(self, peer: Peer) -> None:
        if peer.node_id == self._network.node_id:
            self._network.send(peer.process_id, Ring(nodes=self._ring))

    def _is_node(self, peer: Peer) -> bool:
        """Whether it is the node of its machine, and no script beside it."""
        return self._nodes.get(peer.node_id) == peer.process_id

    def _order(self) -> None:
        """Form the ring anew, and tell the scripts of this machine."""
        speeds = {pair: link.bytes_per_second for pair, link in self._links.items()}
        before, self._ring = self._ring, ring([*self._nodes, self._network.node_id], speeds)
        if self._ring != before:
            for peer in self._network.peers.values():
                if peer.hello.machine is None:
                    self._greet_script(peer)

    def _learn(self, links: Mapping[tuple[str, str], Link]) -> None:
        for pair, link in links.items():
            known = self._links.get(pair)
            if known is None or link.measured_at > known.measured_at:
                self._links[pair] = link
        self._order()

    def _begin_to_measure(self, now: float) -> None:
        """Measure one link at a time, while no script of both machines is in a group."""
        if self._is_measuring:
            return
        peers, own = self._network.peers, self._network.node_id
        busy = {peer.node_id for peer in peers.values() if peer.hello.group is not None}
        for node, process_id in self._nodes.items():
            peer, last = peers[process_id], self._links.get((own, node))
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
        link = Link(bytes_per_second=speed, measured_at=time.time(), addresses=ends)
        links = {(self._network.node_id, node): link}
        self._learn(links)
        for process_id in self._nodes.values():
            self._network.send(process_id, Measured(links=links))

    # For people

    def _note(self, text: str) -> None:
        self._events.append(Event(at=time.time(), text=text))
        self._tell(text)

    def _name(self, node: str) -> str:
        if node == self._network.node_id:
            return f"{self._network.hello.host} ({node})"
        peer = self._network.peers.get(self._nodes.get(node, ""))
        return node if peer is None else f"{peer.member.host} ({node})"

    def _peer_status(self, peer: Peer) -> PeerStatus:
        member, health = peer.member, self._network.health.peers[peer.process_id]
        latency = health.latency_seconds
        return PeerStatus(
            host=member.host,
            node_id=member.node_id,
            process_id=member.process_id,
            address=":".join(map(str, member.address)),
            is_node=peer.hello.machine is not None,
            group=peer.hello.group,
            size=peer.hello.size,
            condition=health.condition,
            latency_ms=None if latency is None else latency * 1e3,
            uptime_ratio=health.uptime_ratio,
        )


_SENTENCES: Final[Mapping[EventKind, str]] = {
    "started": "this node asks the others whether it may lead",
    "elected": "this node leads, in epoch {epoch}",
    "new_master": "{node} leads, in epoch {epoch}",
    "timeout": "no master answers",
    "split_brain": "this node leads, and so does {node}: one of the two steps down",
}


def _machine() -> Machine:
    ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cores=usable_processors(),
        ram_mb=min([ram_bytes, *(limit for limit, _ in memory_limits())]) >> 20,
        gpu_memory_mb=total_memory_mb(),
        chip=platform.machine(),
    )
