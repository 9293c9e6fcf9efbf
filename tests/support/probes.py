"""Households whose nodes probe each other over links that lose packets; simulated, by seed.

Links are those of TCP: a packet that is lost comes later, after 0.2, 0.4, 0.8 s ..., and holds up
all that was sent after it. Now and then a link breaks and is made anew: what is sent meanwhile is
lost. A node that is stopped reads nothing and sends nothing again; its sockets keep what has come.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count, permutations
from typing import Final, Protocol

from muster.mesh.health import PRESETS, Health, PeerHealth, Preset
from muster.mesh.messages import Message, Probe, ProbeFor

HOP_SECONDS = 0.002
RETRY_SECONDS = 0.2
OUTAGE_SECONDS = 20.0
"""Without a link at most, after it broke."""
STOP_SECONDS = 60.0
STOP_EVERY_SECONDS = 600.0
WAKE_SECONDS = 0.05
"""For which a laptop wakes now and then, before it is opened."""


class _Gone:
    """What a closed link gives to read."""


@dataclass
class Node:
    health: Health
    is_stopped: bool = False
    is_dead: bool = False
    well_at: float = 0.0
    """From when on no other node has a reason to remove it."""
    unread: "deque[tuple[str, int, Message | _Gone]]" = field(default_factory=deque)


@dataclass
class World:
    """Nodes of one household, with links and a clock.

    `rules`, `asks_others` and `reads_first` switch off what is needed.
    """

    chance: random.Random
    preset: Preset = PRESETS["default"]
    size: int = 10
    loss: float = 0.2
    break_every_seconds: float = 60.0
    rules: type[Health] = Health
    asks_others: bool = True
    reads_first: bool = True
    now: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    removed: list[tuple[float, str, str]] = field(default_factory=list)
    """When a node has removed another one that did not answer."""
    faults: list[str] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = field(
        default_factory=list
    )
    _order: "count[int]" = field(default_factory=count)
    _links: dict[tuple[str, str], int] = field(default_factory=dict)
    """The number of the link, by both of its ends; 0 while there is none."""
    _arrives: dict[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(self.size):
            self.nodes[f"{number:02}"] = Node(self.rules(self.preset, self.chance))
        for here, there in permutations(self.nodes, 2):
            if here < there:
                third = self.preset.every_seconds / 3
                self.at(self.chance.randrange(3) * third, self._link, here, there)
                self._break_later(here, there)

    def at(self, seconds: float, do: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), do, arguments))

    def run(self, until: float) -> None:
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, do, arguments = heapq.heappop(events)
            do(*arguments)
        self.now = until

    # What happens to nodes

    def stop(self, name: str, seconds: float) -> None:
        self.nodes[name].is_stopped = True
        self.at(self.now + seconds, self._wake, name)

    def kill(self, name: str) -> None:
        self.nodes[name].is_dead = True

    def _wake(self, name: str) -> None:
        node = self.nodes[name]
        node.is_stopped = False
        node.well_at = self.now + self.preset.timeout_seconds
        if self.reads_first:
            self._read(name)
        self._check(name)
        self._read(name)

    def _read(self, name: str) -> None:
        unread = self.nodes[name].unread
        while unread:
            self._take(name, *unread.popleft())

    def _check(self, name: str) -> None:
        node = self.nodes[name]
        due = node.health.check(self.now)
        node.health.events.clear()
        for peer in due.probed:
            self._send(name, peer, Probe(sent_at=self.now))
        if self.asks_others:
            for helper, subject in due.indirect:
                self._send(name, helper, ProbeFor(subject=subject, asked_at=self.now))
        for peer in due.lost:
            self._remove(name, peer)

    def _remove(self, name: str, peer: str) -> None:
        state = self.nodes[peer]
        self.removed.append((self.now, name, peer))
        if not (state.is_dead or state.is_stopped or self.now < state.well_at):
            self.faults.append(f"{name} removed {peer}, which runs, after {self.now:.0f} s")
        self.nodes[name].health.remove(peer)
        link = self._links[name, peer]
        self._links[name, peer] = self._links[peer, name] = 0
        self.at(self.now + HOP_SECONDS, self._arrive, name, peer, link, _Gone())
        self.at(self.now + 1.0, self._meet, name, peer)

    def _watch(self, name: str) -> None:
        """Have the node judge at the times at which something is due."""
        node = self.nodes[name]
        if node.is_dead:
            return
        if not node.is_stopped:
            self._check(name)
        wake_at = self.now + 1.0 if node.is_stopped else node.health.wake_at()
        self.at(max(wake_at, self.now + 0.001), self._watch, name)

    # What happens to links

    def _link(self, here: str, there: str) -> None:
        self._links[here, there] = self._links[there, here] = next(self._order) + 1
        for name, peer in (here, there), (there, here):
            is_first = not self.nodes[name].health.peers
            self.nodes[name].health.add(peer, self.now)
            if is_first:
                self._watch(name)

    def _meet(self, here: str, there: str) -> None:
        """Make a link again once both nodes run and have read that the last one is closed."""
        if self.nodes[here].is_dead or self.nodes[there].is_dead:
            return
        states = self.nodes[here], self.nodes[there]
        if any(state.is_stopped for state in states) or here in states[1].health.peers:
            self.at(self.now + 1.0, self._meet, here, there)
        else:
            self._link(here, there)

    def _break_later(self, here: str, there: str) -> None:
        seconds = self.chance.expovariate(1 / self.break_every_seconds)
        self.at(self.now + seconds, self._break, here, there)

    def _break(self, here: str, there: str) -> None:
        if self._links.get((here, there)):
            self._links[here, there] = self._links[there, here] = -next(self._order)
            self.at(self.now + self.chance.uniform(0, OUTAGE_SECONDS), self._renew, here, there)
        self._break_later(here, there)

    def _renew(self, here: str, there: str) -> None:
        if self._links[here, there] < 0:
            self._links[here, there] = self._links[there, here] = next(self._order)
            self._arrives[here, there] = self._arrives[there, here] = 0.0

    def _send(self, name: str, to: str, message: Message) -> None:
        link = self._links.get((name, to), 0)
        if link <= 0:
            return
        lost = 0
        while self.chance.random() < self.loss:
            lost += 1
        seconds = HOP_SECONDS + RETRY_SECONDS * (2**lost - 1)
        arrives = max(self.now + seconds, self._arrives.get((name, to), 0.0))
        self._arrives[name, to] = arrives
        self.at(arrives, self._arrive, name, to, link, message)

    def _arrive(self, name: str, to: str, link: int, message: Message | _Gone) -> None:
        sender, receiver = self.nodes[name], self.nodes[to]
        if sender.is_dead or receiver.is_dead:
            return
        if sender.is_stopped:  # nor does its kernel send a lost packet again
            self.at(self.now + 1.0, self._arrive, name, to, link, message)
        elif receiver.is_stopped:
            receiver.unread.append((name, link, message))
        else:
            self._take(to, name, link, message)

    def _take(self, name: str, sender: str, link: int, message: Message | _Gone) -> None:
        health = self.nodes[name].health
        if isinstance(message, _Gone):
            health.remove(sender)
        elif self._links.get((name, sender)) == link:
            for to, reply in health.receive(sender, message, self.now):
                self._send(name, to, reply)


def faults_of_loss(
    seed: int,
    seconds: float,
    *,
    rules: type[Health] = Health,
    asks_others: bool = True,
    break_every_seconds: float = World.break_every_seconds,
) -> list[str]:
    """Return which nodes were removed although all of them run."""
    chance = _chance(seed)
    one = World(
        chance, rules=rules, asks_others=asks_others, break_every_seconds=break_every_seconds
    )
    one.run(seconds)
    return one.faults


def faults_of_stops(
    seed: int, seconds: float, *, rules: type[Health] = Health, reads_first: bool = True
) -> list[str]:
    """Return which nodes were removed without a reason, or stopped and not removed.

    Every ten minutes a node is stopped for a minute, every second time with short wakes.
    """
    one = World(_chance(seed), rules=rules, reads_first=reads_first)
    limit = detection_seconds(one.preset)
    for number in range(int(seconds / STOP_EVERY_SECONDS)):
        began = one.chance.uniform(0.2, 0.8) * STOP_EVERY_SECONDS + number * STOP_EVERY_SECONDS
        one.run(began)
        name = one.chance.choice(sorted(one.nodes))
        if number % 2:
            for part in range(3):
                one.stop(name, STOP_SECONDS / 3 - WAKE_SECONDS)
                one.run(began + (part + 1) * STOP_SECONDS / 3)
            continue
        one.stop(name, STOP_SECONDS)
        one.run(began + limit)
        kept = [peer for peer, node in one.nodes.items() if name in node.health.peers]
        if kept:
            one.faults.append(f"{', '.join(kept)} kept {name}, stopped after {began:.0f} s")
    one.run(seconds)
    return one.faults


def silence_seconds(seed: int, preset: Preset) -> float:
    """Return how long after its end the last other node removes one that is dead."""
    one = World(_chance(seed), preset, size=5)
    died = one.chance.uniform(30, 60)
    one.run(died)
    one.kill("00")
    while any("00" in node.health.peers for name, node in one.nodes.items() if name != "00"):
        one.run(one.now + 0.05)
        if one.now > died + 600:
            break
    return one.now - died


def detection_seconds(preset: Preset) -> float:
    """Return how long after its end a peer is removed at the latest."""
    return preset.timeout_seconds + preset.failures * preset.every_seconds


def _chance(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  repeatable, not secret


class WithoutOwnStops(Health):
    """A process that was stopped judges its peers all the same."""

    def _shift(self, now: float) -> None:
        pass


class WithoutClearing(Health):
    """An answer clears only the newest probe."""

    def _clear(self, state: PeerHealth, at: float) -> None:
        if state.open and state.open[-1] <= at:
            state.open.pop()
            state.answered += 1


class Play(Protocol):
    """Plays a history, and returns what is wrong."""

    def __call__(self, seed: int, seconds: float) -> list[str]: ...


WITHOUT: Final[Mapping[str, Play]] = {
    "others that probe": partial(faults_of_loss, asks_others=False),
    "an answer to all older probes": partial(faults_of_loss, rules=WithoutClearing),
    "sockets before timers, and lateness": partial(
        faults_of_stops, rules=WithoutOwnStops, reads_first=False
    ),
}
"""Histories without a rule that is needed."""
