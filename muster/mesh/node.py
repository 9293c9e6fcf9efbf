"""The node of this machine: who leads the household, and how fast the links between nodes are.

A part of the network. What follows is decided in `election` and `topology`; this module stores,
sends and measures. Its process has another id at each start, so nodes are known by the key of
their machine.
"""

import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from random import SystemRandom
from typing import Final

import msgspec

from muster.checkpoints.local import LocalFileSystem, replace_file
from muster.contracts.errors import AuthenticationFailed, WireError
from muster.host.gpus import total_memory_mb
from muster.host.limits import usable_memory_mb, usable_processors
from muster.host.private import UnusableDirectory
from muster.host.processes import since_boot
from muster.mesh import bandwidth
from muster.mesh.election import (
    CLOCK_LIMIT_SECONDS,
    Ask,
    Due,
    Election,
    EventKind,
    Outdated,
    Report,
    Stored,
    is_clock_credible,
)
from muster.mesh.identity import Member
from muster.mesh.messages import Hello, Measured, Message, Ring
from muster.mesh.network import NAME_LIMIT, Network, Peer
from muster.mesh.topology import Link, Machine, is_due, ring

STATUS: Final = "status"
"""The topic of notes that ask a node for its `Status`."""

SLEEP_SECONDS: Final = 15.0
"""After a longer stop a node begins a new session: others have removed it, or will."""

SETTLE_SECONDS: Final = 5.0
"""From the meeting of two nodes to the measurement of their link."""

RETRY_SECONDS: Final = 60.0
"""After a measurement that failed."""

CLOCK_STEP_SECONDS: Final = 60.0
"""By which the clock of this machine is set before others hear it anew."""

ORDER_SECONDS: Final = 1.0
"""From one ring to the next: many links are measured at once, and a ring takes a tenth of this."""

EVENT_LIMIT: Final = 64


class PeerStatus(Member, frozen=True, kw_only=True):
    """A process that is linked to a node."""

    machine: Machine | None
    """None for a script."""
    group: str | None
    size: int | None
    condition: str
    latency_ms: float | None
    """The moving average of round trips."""
    uptime_ratio: float


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
    links: tuple[Link, ...]
    events: tuple[Event, ...]
    counters: Mapping[str, float]
    warnings: tuple[str, ...]


class Node:
    """All that it does, it does in the thread of its network."""

    def __init__(
        self,
        network: Network,
        file: Path,
        tell: Callable[[str], None],
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        """`file` keeps session and epoch, and `tell` gets a line for people at each event.

        Raises `UnusableDirectory` if the file cannot be written.
        """
        self._network = network
        self._file = file
        self._tell = tell
        self._time_of_day = time_of_day
        self._chance = SystemRandom()
        self._nodes: dict[str, str] = {}
        """The process of each linked node, by the id of the node."""
        self._clocks: dict[str, float] = {}
        """The time of day at each linked node, when this machine was started."""
        self._measure_at: dict[str, float] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._is_measuring = False
        self._ring: tuple[str, ...] = (network.node_id,)
        self._is_ring_old = False
        self._ordered_at = float("-inf")
        self._events: deque[Event] = deque(maxlen=EVENT_LIMIT)
        self._counts: Counter[str] = Counter()
        self._problems: list[str] = []
        """What is wrong with this node now."""
        self._told: set[str] = set()
        """Warnings of the network that were given to `tell`."""
        self._unsaved: Stored | None = None
        self._disk_error = ""
        self._awake_at = since_boot()
        self._clock = time_of_day() - self._awake_at
        """What others know of the clock of this machine."""
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
        machine = Machine(
            cores=usable_processors(),
            ram_mb=usable_memory_mb(),
            gpu_memory_mb=total_memory_mb(),
            chip=platform.machine(),
        )
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
            links=tuple(self._links.values()),
            events=tuple(self._events),
            counters=network.counters() | self._counts,
            warnings=(*network.warnings, *self._problems),
        )

    # The part

    def receive(self, peer: Peer, message: Message) -> None:
        now = self._wake()
        is_node = self._is_node(peer)
        match message:
            case Hello(machine=None):
                self._greet_script(peer)
            case Hello():
                self._greet_node(peer, now)
            case Ask() | Report() | Outdated() if is_node:
                self._election.receive(peer.node_id, message, now)
            case Measured(links=links) if is_node:
                self._learn(links)

    def renew(self, peer: Peer) -> None:
        if self._is_node(peer):
            self._welcome(peer, self._wake())
        else:
            self._greet_script(peer)

    def lose(self, peer: Peer) -> None:
        if not self._is_node(peer):
            return
        node, now = peer.node_id, self._wake()
        # The last hello of a process that is gone may have come after that of its successor.
        for other in self._network.peers.values():
            if other.node_id == node and other.hello.machine is not None:
                self._welcome(other, now)
                return
        self._note(f"{self._name(node, peer)} {'has left' if peer.has_left else 'is gone'}")
        del self._nodes[node], self._clocks[node]
        self._election.lose(node, now)
        self._is_ring_old = True

    def check(self) -> None:
        now = self._wake()
        self._say_clock(now)
        self._election.permit(now, may_lead=self._may_lead())
        self._election.check(now)
        due = self._election.take()
        self._store(due)
        if self._unsaved is None:
            for node, message in due.messages:
                self._network.send(self._nodes.get(node, ""), message)
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
        self._order(now)
        self._begin_to_measure(now)
        told, self._problems = self._problems, [*self._own_problems()]
        for text in self._problems:
            if text not in told:
                self._tell(text)
        for text in self._network.warnings.keys() - self._told:
            if len(self._told) < NAME_LIMIT:  # strangers may cause any number
                self._told.add(text)
                self._tell(text)

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
        return Election(own, self._stored, self._time_of_day(), now, self._chance)

    def _say_clock(self, now: float) -> None:
        """Greet all anew after the clock was set, as by NTP some time after a boot."""
        clock = self._time_of_day() - now
        if abs(clock - self._clock) > CLOCK_STEP_SECONDS:
            self._clock = clock
            self._network.say()

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
            self._disk_error = error.strerror or str(error)
        else:
            self._stored, self._unsaved = self._unsaved, None

    def _offsets_seconds(self) -> dict[str, float]:
        """Return by how much the clock of each node is ahead of the one of this machine."""
        own = self._time_of_day() - since_boot()
        return {node: clock - own for node, clock in self._clocks.items()}

    def _may_lead(self) -> bool:
        """Whether this node has a disk to remember by, and a clock that others agree with."""
        return self._unsaved is None and is_clock_credible(self._offsets_seconds().values())

    def _own_problems(self) -> Iterator[str]:
        for node, offset_seconds in self._offsets_seconds().items():
            if abs(offset_seconds) > CLOCK_LIMIT_SECONDS:
                way = "ahead of" if offset_seconds > 0 else "behind"
                yield (
                    f"the clock of {self._name(node)} is {abs(offset_seconds) / 3600:.0f} hours "
                    f"{way} the one of this machine: set both, by NTP"
                )
        if self._unsaved is not None:
            yield (
                f"{self._file} cannot be written ({self._disk_error}): make room there; until "
                "then this node does not lead, and says nothing"
            )

    # Nodes and links

    def _greet_node(self, peer: Peer, now: float) -> None:
        node, network = peer.node_id, self._network
        if node == network.node_id:
            network.warn(f"{peer.member} has the key of this node: remove node.key there")
            return
        self._clocks[node] = peer.hello.clock - now
        if not self._is_node(peer):
            self._welcome(peer, now)

    def _welcome(self, peer: Peer, now: float) -> None:
        node, network = peer.node_id, self._network
        self._nodes[node] = peer.process_id
        self._measure_at[node] = now + SETTLE_SECONDS
        network.send(peer.process_id, Measured(links=tuple(self._links.values())))
        self._election.meet(node, now)
        self._is_ring_old = True

    def _is_node(self, peer: Peer) -> bool:
        """Whether it is the node of its machine, and no script beside it."""
        return self._nodes.get(peer.node_id) == peer.process_id

    def _greet_script(self, peer: Peer) -> None:
        if peer.node_id == self._network.node_id:
            self._network.send(peer.process_id, Ring(nodes=self._ring))

    def _order(self, now: float) -> None:
        """Form the ring anew if that is due, and tell the scripts of this machine."""
        if not self._is_ring_old or now < self._ordered_at + ORDER_SECONDS:
            return
        self._is_ring_old, self._ordered_at = False, now
        speeds = {pair: link.bytes_per_second for pair, link in self._links.items()}
        before, self._ring = self._ring, ring([*self._nodes, self._network.node_id], speeds)
        if self._ring != before:
            for peer in self._network.peers.values():
                if peer.hello.machine is None:
                    self._greet_script(peer)

    def _learn(self, links: Iterable[Link]) -> None:
        linked = {self._network.node_id, *self._nodes}
        for link in links:
            known = self._links.get(link.nodes)
            is_new = known is None or link.measured_at > known.measured_at
            if is_new and linked.issuperset(link.nodes):  # each node says its own when it is met
                self._links[link.nodes] = link
                self._is_ring_old = True

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
        pair, now = (self._network.node_id, node), time.time()
        links = (Link(nodes=pair, bytes_per_second=speed, measured_at=now, addresses=ends),)
        self._learn(links)
        for process_id in self._nodes.values():
            self._network.send(process_id, Measured(links=links))

    # For people

    def _note(self, text: str) -> None:
        self._events.append(Event(at=time.time(), text=text))
        self._tell(text)

    def _name(self, node: str, peer: Peer | None = None) -> str:
        if node == self._network.node_id:
            return f"{self._network.hello.host} ({node})"
        peer = peer or self._network.peers.get(self._nodes.get(node, ""))
        return node if peer is None else f"{peer.member.host} ({node})"

    def _peer_status(self, peer: Peer) -> PeerStatus:
        health = self._network.health.peers[peer.process_id]
        latency = health.latency_seconds
        return PeerStatus(
            **msgspec.structs.asdict(peer.member),
            machine=peer.hello.machine,
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
