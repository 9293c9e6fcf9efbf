"""Histories of nodes that elect a master, while machines, clocks, disks and networks fail."""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, count
from typing import TypeAlias

from muster.mesh.election import (
    NO_ROWS,
    Election,
    ElectionMessage,
    Event,
    Rank,
    State,
    Stored,
)

YEAR_SECONDS = 365.25 * 86400
NEW_SESSION_SECONDS = 15.0
"""A process that was stopped for longer begins a new session."""
LIMIT_SECONDS = 6.0
"""From quiet to one master."""
WATCH_SECONDS = 12.0
"""From quiet to the end: the master has to stay."""
HOP_SECONDS = 0.05
LATE_SECONDS = 2.0
SENT_LIMIT = 200
"""Messages of each pair in a history."""

Edge: TypeAlias = tuple[str, str]


@dataclass
class Node:
    """A machine, with what it keeps when its process dies."""

    wall_offset: float
    may_lead: bool = True
    copy: Rank = NO_ROWS
    """Which rows it has, all the time."""
    stored: Stored = field(default_factory=Stored)
    unsaved: Stored | None = None
    backups: list[Stored] = field(default_factory=list)
    is_restored: bool = False
    has_disk: bool = True
    election: Election | None = None
    frozen_at: float | None = None
    inbox: list[tuple[str, ElectionMessage]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    """The newest session of each other node that has come here, in this life."""
    epoch: int = 0
    wake_at: float = float("inf")
    events: list[tuple[float, Event]] = field(default_factory=list)


@dataclass
class World:
    """Nodes, the links between them, and time."""

    chance: random.Random
    make: type[Election] = Election
    loss: float = 0.0
    late: float = 0.0
    """The part of all messages that takes up to two seconds."""
    twice: float = 0.0
    now: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    blocked: set[Edge] = field(default_factory=set)
    """From whom nothing comes to whom."""
    faults: list[str] = field(default_factory=list)
    sent: int = 0
    parts: list[list[str]] = field(default_factory=list)
    """Each has to have one master, once they are set."""
    agreed_at: float | None = None
    settled_seconds: float = 0.0
    """From quiet to one master."""
    _used: dict[tuple[str, int], Election] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: "count[int]" = field(default_factory=count)

    def at(self, seconds: float, do: Callable[..., None], *args: object) -> None:
        what: Callable[[], None] = partial(do, *args)
        heapq.heappush(self._events, (seconds, next(self._order), what))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()
            if self.sent > SENT_LIMIT * len(self.nodes) ** 2:
                self._find("they talk without end")
                return
        self.now = until

    def living(self) -> list[str]:
        return [
            name for name, node in self.nodes.items() if node.election and node.frozen_at is None
        ]

    def masters(self) -> set[str | None]:
        """Return who leads, as the living nodes see it."""
        found = [self.nodes[name].election for name in self.living()]
        return {election.master for election in found if election is not None}

    # Faults

    def start(self, name: str) -> None:
        node = self.nodes[name]
        if node.election is None and node.frozen_at is None:
            self._begin(name)
            self._act(name)

    def _begin(self, name: str) -> None:
        node = self.nodes[name]
        wall = self.now + node.wall_offset
        chance = random.Random(self.chance.getrandbits(32))  # noqa: S311  repeatable, not secret
        node.election = self.make(name, node.stored, wall, self.now, chance)
        node.election.copy = node.copy
        node.election.permit(self.now, may_lead=node.may_lead and node.has_disk)
        node.seen, node.unsaved, node.epoch = {}, None, node.election.epoch
        for other in self.nodes:
            if other != name and (name, other) not in self.blocked:
                delay = self.chance.uniform(0.01, 0.5)
                self.at(self.now + delay, self.meet, name, other, node.election)
                self.at(self.now + delay, self.meet, other, name, None)

    def meet(self, name: str, other: str, election: Election | None = None) -> None:
        node = self.nodes[name]
        if node.election and node.frozen_at is None and election in (None, node.election):
            node.election.meet(other, self.now)
            self._act(name)

    def lose(self, name: str, other: str) -> None:
        node = self.nodes[name]
        if node.election and node.frozen_at is None:
            node.election.lose(other, self.now)
            self._act(name)

    def kill(self, name: str) -> None:
        self.nodes[name].election = None
        if self.chance.random() < 0.5:  # else its machine says nothing
            for other in self.nodes:
                self.at(self.now + 0.1, self._miss, other, name)

    def _miss(self, name: str, other: str) -> None:
        if self.nodes[other].election is None:  # else it is linked anew
            self.lose(name, other)

    def freeze(self, name: str) -> None:
        if self.nodes[name].frozen_at is None:
            self.nodes[name].frozen_at = self.now

    def thaw(self, name: str) -> None:
        node = self.nodes[name]
        if node.frozen_at is None:
            return
        seconds, node.frozen_at = self.now - node.frozen_at, None
        if node.election is not None:
            if seconds > NEW_SESSION_SECONDS:
                self._begin(name)
            for other in self.nodes:  # that were linked meanwhile
                if other != name and (name, other) not in self.blocked:
                    node.election.meet(other, self.now)
            inbox, node.inbox = node.inbox, []
            for sender, message in inbox:
                self._receive(name, sender, message)
            self._permit(name)

    def jump(self, name: str, seconds: float) -> None:
        self.nodes[name].wall_offset += seconds

    def restore(self, name: str) -> None:
        """Put an old state on the disk of a node that is dead, and start it."""
        node = self.nodes[name]
        if node.election is None and node.backups:
            node.stored, node.is_restored = self.chance.choice(node.backups), True
        self.start(name)

    def permit(self, name: str, *, may_lead: bool) -> None:
        self.nodes[name].may_lead = may_lead
        self._permit(name)

    def break_disk(self, name: str, *, is_broken: bool) -> None:
        node = self.nodes[name]
        node.has_disk = not is_broken
        if node.has_disk and node.unsaved:
            node.stored, node.unsaved = node.unsaved, None
        self._permit(name)

    def _permit(self, name: str) -> None:
        node = self.nodes[name]
        if node.election and node.frozen_at is None:
            node.election.permit(self.now, may_lead=node.may_lead and node.has_disk)
            self._act(name)

    def cut(self, blocked: set[Edge]) -> None:
        """Change the network; half of the links that end are seen to end."""
        before, self.blocked = self.blocked, blocked
        for edge in sorted(before ^ blocked):
            if edge in before:  # a link has two ends, whichever way it was cut
                self.meet(*edge)
                self.meet(*edge[::-1])
            elif self.chance.random() < 0.5:
                self.lose(*edge)

    def calm(self, blocked: set[Edge]) -> None:
        """End all faults; what is on its way comes late. One master is due."""
        self.loss = self.late = self.twice = 0.0
        for name, node in self.nodes.items():
            if not node.has_disk:
                self.break_disk(name, is_broken=False)
        self.cut(blocked)
        self.parts = [part for part in self._parts() if self._is_close(part)]
        self._judge()

    # Messages

    def _act(self, name: str) -> None:
        node = self.nodes[name]
        election = node.election
        assert election is not None
        election.check(self.now)
        due = election.take()
        if not node.has_disk:
            node.unsaved = due.stored or node.unsaved
            election.permit(self.now, may_lead=False)
            node.unsaved = election.take().stored or node.unsaved
            due.messages.clear()
        elif due.stored is not None:
            node.backups.append(node.stored)
            node.stored = due.stored
        node.events += [(self.now, event) for event in due.events]
        self._inspect(name, node, election)
        for to, message in due.messages:
            self._send(name, to, message)
        wake_at = max(election.wake_at(), self.now + 1e-6)
        if not self.now < node.wake_at <= wake_at:
            node.wake_at = wake_at
            self.at(wake_at, self._wake, name, wake_at)

    def _wake(self, name: str, planned: float) -> None:
        node = self.nodes[name]
        if node.wake_at == planned:
            node.wake_at = float("inf")
            if node.election and node.frozen_at is None:
                self._act(name)

    def _send(self, sender: str, to: str, message: ElectionMessage) -> None:
        self.sent += 1
        if (sender, to) in self.blocked or self.chance.random() < self.loss:
            return
        for _ in range(1 + (self.chance.random() < self.twice)):
            is_late = self.chance.random() < self.late
            delay = self.chance.uniform(0.001, LATE_SECONDS if is_late else HOP_SECONDS)
            self.at(self.now + delay, self._deliver, sender, to, message)

    def _deliver(self, sender: str, to: str, message: ElectionMessage) -> None:
        node = self.nodes[to]
        if node.election is None:
            return
        if node.frozen_at is not None:
            node.inbox.append((sender, message))
            return
        self._receive(to, sender, message)
        self._act(to)

    def _receive(self, to: str, sender: str, message: ElectionMessage) -> None:
        node = self.nodes[to]
        assert node.election is not None
        node.seen[sender] = max(node.seen.get(sender, 0), message.head.session)
        node.election.receive(sender, message, self.now)

    # What has to hold

    def _inspect(self, name: str, node: Node, election: Election) -> None:
        if (followed := election.accepted) is not None:
            if followed.session < node.seen.get(followed.node, 0):
                self._find(f"{name} follows an old session of {followed.node}")
            if followed.epoch < node.epoch:
                self._find(f"{name} follows the lower epoch {followed.epoch}")
            node.epoch = followed.epoch
        if election.state is State.MASTER:
            node.epoch = election.epoch
            by = self._used.setdefault((name, election.epoch), election)
            if by is not election and not node.is_restored:
                self._find(f"{name} leads twice in epoch {election.epoch}")
        if self.parts:
            self._judge()

    def _find(self, what: str) -> None:
        if what not in self.faults:
            self.faults.append(f"{self.now:.2f}: {what}")

    def _judge(self) -> None:
        if not all(self._has_one_master(part) for part in self.parts):
            self.agreed_at = None
        elif self.agreed_at is None:
            self.agreed_at = self.now

    def _has_one_master(self, part: list[str]) -> bool:
        elections = [election for name in part if (election := self.nodes[name].election)]
        (first, *others) = [election.master for election in elections]
        if any(other != first for other in others):
            return False
        if first is None:
            return not any(self.nodes[name].may_lead for name in part)
        leading = self.nodes[first].election
        if leading is None or leading.state is not State.MASTER:
            return False
        able = [self.nodes[name] for name in part if self.nodes[name].may_lead]
        if any(other.copy[0] > self.nodes[first].copy[0] for other in able):
            return False  # it lacks acknowledged rows
        # One that a member hears, and that answered it before the way back was cut, counts too.
        return first in part or any((first, name) not in self.blocked for name in part)

    def _linked(self, name: str, nodes: list[str]) -> set[str]:
        return {
            other
            for other in nodes
            if other != name and not {(name, other), (other, name)} & self.blocked
        }

    def _parts(self) -> Iterator[list[str]]:
        living = self.living()
        left = set(living)
        while left:
            part, rim = set[str](), {min(left)}
            while rim:
                part |= rim
                rim = set().union(*(self._linked(name, living) for name in rim)) - part
            yield sorted(part)
            left -= part

    def _is_close(self, part: list[str]) -> bool:
        """Whether there is at most one node between two."""
        links = {name: self._linked(name, part) for name in part}
        return all(b in links[a] or links[a] & links[b] for a, b in combinations(part, 2))


# Histories


def network(chance: random.Random, names: list[str]) -> set[Edge]:
    """Return what a random network blocks: nothing, two parts, or single links and ways."""
    kind = chance.choice(["whole", "parts", "sparse"])
    if kind == "parts":
        left = {name for name in names if chance.random() < 0.5}
        return {(a, b) for a in names for b in names if (a in left) != (b in left)}
    blocked = set[Edge]()
    if kind == "sparse":
        share = chance.choice([0.2, 0.5])
        for a, b in combinations(names, 2):
            if chance.random() < share:
                blocked |= {(a, b), (b, a)}
            elif chance.random() < 0.1:
                blocked.add(chance.choice([(a, b), (b, a)]))
    return blocked


def _disturb(world: World, name: str, at: float, quiet_at: float) -> None:
    """Have one fault happen at a time, over before quiet or never."""
    chance = world.chance

    def later(shortest: float, longest: float) -> float:
        return min(at + chance.uniform(shortest, longest), quiet_at)

    kind = chance.choice(
        ["kill", "kill", "restore", "freeze", "sleep", "jump", "cut", "may", "disk"]
    )
    if kind in {"kill", "restore"}:
        world.at(at, world.kill, name)
        if chance.random() < 0.8:
            world.at(later(0.1, 10), world.restore if kind == "restore" else world.start, name)
    elif kind in {"freeze", "sleep"}:
        world.at(at, world.freeze, name)
        if chance.random() < 0.8:
            world.at(later(0.5, 15) if kind == "freeze" else later(15, 60), world.thaw, name)
    elif kind == "jump":
        world.at(at, world.jump, name, chance.uniform(-YEAR_SECONDS, YEAR_SECONDS))
    elif kind == "cut":
        world.at(at, world.cut, network(chance, [*world.nodes]))
    elif kind == "may":
        world.at(at, partial(world.permit, name, may_lead=False))
        again = chance.random() < 0.7
        world.at(later(1, 20), partial(world.permit, name, may_lead=again))
    else:
        world.at(at, partial(world.break_disk, name, is_broken=True))


def play(
    seed: int, make: type[Election] = Election, size: int = 0, *, has_copies: bool = False
) -> World:
    """Return a world at the end of one history; `size` nodes, or 3 to 9.

    With `has_copies` they have different rows, and the newest have to lead.
    """
    chance = random.Random(f"{seed} {size}")  # noqa: S311  repeatable, not secret
    world = World(chance, make, chance.choice([0.0, 0.05, 0.2, 0.4]), late=0.05, twice=0.05)
    names = [f"{chance.getrandbits(32):08x}" for _ in range(size or chance.randint(3, 9))]
    for name in names:
        offset = chance.choice([0.0, 0.0, chance.uniform(-YEAR_SECONDS, YEAR_SECONDS)])
        world.nodes[name] = Node(1.7e9 + offset, may_lead=chance.random() < 0.9)
        world.at(chance.uniform(0, 8), world.start, name)
    if has_copies:
        for number, node in enumerate(world.nodes.values()):
            node.copy = (1, (seed + number) % 3), (2, (seed * 7 + number) % 5)
    quiet_at = chance.uniform(9, 40)
    world.cut(network(chance, names))
    for _ in range(chance.randint(0, 8)):
        at = quiet_at - chance.choice([chance.uniform(0, 2), chance.uniform(0, quiet_at)])
        _disturb(world, chance.choice(names), at, quiet_at)
    world.at(quiet_at, world.calm, network(chance, names))
    world.run(quiet_at + WATCH_SECONDS)
    world.settled_seconds = (world.agreed_at or world.now) - quiet_at if world.parts else 0.0
    if world.settled_seconds > LIMIT_SECONDS:
        world.faults.append(f"one master {world.settled_seconds:.2f} s after quiet")
    return world


def faults(make: type[Election], seed: int, size: int = 0) -> list[str]:
    """Return what is wrong in one history."""
    return play(seed, make, size).faults


def changes(world: World) -> int:
    """Count how often a node has heard of another master."""
    kinds = {"elected", "new_master"}
    return sum(event.kind in kinds for node in world.nodes.values() for _, event in node.events)
