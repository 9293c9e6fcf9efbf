"""The node of this machine: who leads the household.

A part of the network. What follows is decided in `election`; this module stores
and sends. Its process has another id at each start, so nodes are known by the key of their machine.
"""

import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import SystemRandom
from typing import Final

import msgspec

from muster.checkpoints.local import LocalFileSystem, replace_file
from muster.contracts.errors import MusterError, printable
from muster.host.gpus import total_memory_mb
from muster.host.limits import usable_memory_mb, usable_processors
from muster.host.private import UnusableDirectory
from muster.host.processes import since_boot
from muster.mesh.election import (
    CLOCK_LIMIT_SECONDS,
    Ask,
    Due,
    Election,
    EventKind,
    Outdated,
    Report,
    State,
    Stored,
    is_clock_credible,
)
from muster.mesh.founding import Founding
from muster.mesh.identity import Member
from muster.mesh.messages import ClusterRecord, Copy, Hello, Measured, Message
from muster.mesh.network import NAME_LIMIT, Network, Peer
from muster.mesh.node_links import NodeLinks
from muster.mesh.topology import Link, Machine

STATUS: Final = "status"
"""The topic of notes that ask a node for its `Status`."""

SLEEP_SECONDS: Final = 15.0
"""After a longer stop a node begins a new session: others have removed it, or will."""

CLOCK_STEP_SECONDS: Final = 60.0
"""By which the clock of this machine is set before others hear it anew."""

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
    has_rows: bool
    """Whether it leads, or has all rows of the node that leads."""


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
        *,
        founding: Founding | None = None,
        slots: int = 1,
    ) -> None:
        """`file` keeps session and epoch, and `tell` gets a line for people at each event.

        `slots` is how many ranks may run here. Without `founding` any node may lead, as it has no
        rows to keep. Raises `UnusableDirectory` if the file cannot be written.
        """
        self.founding = founding
        self.is_member = False
        """Whether the rows of this node are those of its cluster, if it has some."""
        self.is_copy_known = True
        """False until it is known which rows this node has: it answers no call until then."""
        self._network = network
        self._file = file
        self._tell = tell
        self._time_of_day = time_of_day
        self._chance = SystemRandom()
        self._nodes: dict[str, str] = {}
        """The process of each linked node, by the id of the node."""
        self._clocks: dict[str, float] = {}
        """The time of day at each linked node, when this machine was started."""
        self.links = NodeLinks(network, self._nodes)
        self._events: deque[Event] = deque(maxlen=EVENT_LIMIT)
        self._counts: Counter[str] = Counter()
        self._has_resigned = False
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
        self._began_at = self._awake_at
        network.readers[STATUS] = lambda asker, _: msgspec.json.encode(self.status(asker))
        network.attach(self)
        machine = Machine(
            cores=usable_processors(),
            ram_mb=usable_memory_mb(),
            gpu_memory_mb=total_memory_mb(),
            chip=platform.machine(),
            slots=slots,
        )
        network.do(lambda: network.say(machine=machine, cluster=self.cluster))

    @property
    def leads(self) -> bool:
        """Whether this node leads a cluster."""
        return self.cluster is not None and self._election.state is State.MASTER

    @property
    def lost_master(self) -> str:
        """The id of the node that has led before, if this one has lost it."""
        return self._election.lost

    @property
    def epoch(self) -> int:
        """The epoch of the master, as far as this node knows."""
        return self._election.epoch

    def resign(self) -> None:
        """Lead no more, in the thread of the network."""
        self._has_resigned = True
        self._network.act()

    @property
    def is_eligible(self) -> bool:
        """Whether this node may lead once its rows are the newest."""
        founding = self.founding
        if founding is None:
            return True
        if founding.record is not None and self._network.hello.copy is not None:
            return self.is_member
        alone_seconds = 0 if self._nodes else self._awake_at - self._began_at
        return founding.may_lead(self._network.node_id, alone_seconds)

    @property
    def cluster(self) -> ClusterRecord | None:
        """The cluster of this node; None while it belongs to none."""
        return None if self.founding is None else self.founding.record

    @property
    def master(self) -> str | None:
        """The id of the node that leads, as far as this one knows."""
        return self._election.master

    def process_of(self, node: str) -> str:
        """Return the process id of a linked node, "" if it is not linked."""
        return self._nodes.get(node, "")

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
            may_lead=self.is_eligible and self._is_able(),
            ring=self.links.ring,
            peers=tuple(map(self._peer_status, peers)),
            links=tuple(self.links.known.values()),
            events=tuple(self._events),
            counters=network.counters() | self._counts,
            warnings=(*network.warnings, *self._problems),
        )

    # The part

    def receive(self, peer: Peer, message: Message) -> None:
        now = self._wake()
        is_node = self.is_node(peer)
        match message:
            case Hello(machine=None):
                self.links.greet_script(peer)
            case Hello():
                self._greet_node(peer, now)
            case Ask() | Report() | Outdated() if is_node:
                self._election.receive(peer.node_id, message, now)
            case Measured(links=links) if is_node:
                self.links.learn(links)

    def renew(self, peer: Peer) -> None:
        if self.is_node(peer):
            self._welcome(peer, self._wake())
        else:
            self.links.greet_script(peer)

    def lose(self, peer: Peer) -> None:
        if not self.is_node(peer):
            return
        node, now = peer.node_id, self._wake()
        # The last hello of a process that is gone may have come after that of its successor.
        for other in self._network.peers.values():
            if other.node_id == node and other.hello.machine is not None:
                self._welcome(other, now)
                return
        self._note(f"{self._name(node, peer)} {'has left' if peer.has_left else 'is gone'}")
        self._forget(node, now)

    def _forget(self, node: str, now: float) -> None:
        del self._nodes[node], self._clocks[node]
        self._election.lose(node, now)
        self.links.is_ring_old = True

    def check(self) -> None:
        now = self._wake()
        self._say_clock(now)
        copy = self._network.hello.copy or Copy()
        self._election.copy = copy.rank if self.is_copy_known and not copy.is_live else None
        self._election.permit(now, may_lead=self.is_eligible and self._is_able())
        self._election.check(now)
        self._found()
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
            if peer is not None and self.is_node(peer):
                self._note(f"{self._name(peer.node_id)} is {change.condition}")
        self.links.check(now)
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

    def _is_able(self) -> bool:
        """Whether this node has a disk to remember by, and a clock that others share."""
        if self._has_resigned:
            return False
        return self._unsaved is None and is_clock_credible(self._offsets_seconds().values())

    def _found(self) -> None:
        """Begin a cluster if this node is the first that leads."""
        founding, network = self.founding, self._network
        if self._election.state is State.MASTER and founding and founding.record is None:
            try:
                founding.found(network.node_id, network.hello.host)
            except OSError as error:
                self._disk_error = error.strerror or str(error)
            else:
                self._note("this node has founded the cluster, and has its jobs")
                network.say(cluster=founding.record)

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
        if self._is_of_other_cluster(peer):
            if self.is_node(peer):
                self._forget(node, now)
            return
        self._clocks[node] = peer.hello.clock - now
        if not self.is_node(peer):
            self._welcome(peer, now)

    def _is_of_other_cluster(self, peer: Peer) -> bool:
        """Whether a node has no part in the cluster of this one, which joins its if it has none."""
        theirs, own = peer.hello.cluster, self.cluster
        if self.founding is None or theirs is None:
            return False
        if own is not None and own.cluster_id == theirs.cluster_id:
            return False
        name = self._name(peer.node_id, peer)
        if own is not None:
            self._network.warn(
                f"{name} is of the cluster that {printable(theirs.name)} has founded, and this "
                f"machine of the one of {own.name}: type muster node leave on one of the two"
            )
            return True
        try:
            remark = self.founding.join(theirs)
        except (OSError, MusterError) as error:
            self._network.warn(f"the cluster of {name} cannot be joined: {error}")
            return True
        if remark:
            self._note(remark)
        self._note(f"this node has joined the cluster that {printable(theirs.name)} has founded")
        self._network.say(cluster=theirs)
        return False

    def _welcome(self, peer: Peer, now: float) -> None:
        self._nodes[peer.node_id] = peer.process_id
        self.links.meet(peer, now)
        self._election.meet(peer.node_id, now)

    def is_node(self, peer: Peer) -> bool:
        """Whether it is the node of its machine, and no script beside it."""
        return self._nodes.get(peer.node_id) == peer.process_id

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
        latency, copy = health.latency_seconds, peer.hello.copy
        leads = peer.node_id == self._election.master and self.is_node(peer)
        return PeerStatus(
            **msgspec.structs.asdict(peer.member),
            machine=peer.hello.machine,
            group=peer.hello.group,
            size=peer.hello.size,
            condition=health.condition,
            latency_ms=None if latency is None else latency * 1e3,
            uptime_ratio=health.uptime_ratio,
            has_rows=leads or (copy is not None and copy.is_live),
        )


_SENTENCES: Final[Mapping[EventKind, str]] = {
    "started": "this node asks the others whether it may lead",
    "elected": "this node leads, in epoch {epoch}",
    "new_master": "{node} leads, in epoch {epoch}",
    "timeout": "no master answers",
    "split_brain": "this node leads, and so does {node}: one of the two steps down",
}
