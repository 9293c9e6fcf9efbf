"""Histories of scripts that start, find each other, form groups, and die at any moment."""

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from muster.mesh.forming import (
    SETTLE_SECONDS,
    Agree,
    Closed,
    Forming,
    FormingMessage,
    Full,
    State,
    Waits,
)

LONG_SECONDS = 40.0


@dataclass
class World:
    """Scripts that form groups of `size`, with links, delays and a clock."""

    chance: random.Random
    size: int
    make: type[Forming] = Forming
    now: float = 0.0
    fatal: int = 0
    """The message with which one of its two ends dies."""
    delivered: int = 0
    is_endless: bool = False
    """They have talked too much."""
    scripts: dict[str, Forming] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    anew: set[str] = field(default_factory=set)
    """Scripts that wait again, after a group that they were in."""
    ready_at: dict[str, float] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: "count[int]" = field(default_factory=count)
    _links: set[tuple[str, str]] = field(default_factory=set)
    _arrives: dict[tuple[str, str], float] = field(default_factory=dict)

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), do))

    def run(self, until: float = LONG_SECONDS) -> None:
        for _ in range(20_000):
            if not self._events or self._events[0][0] > until:
                return
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.is_endless = True

    def start(self, name: str) -> None:
        token = self.chance.randbytes(4)
        self.scripts[name] = self.make(name, self.size, lambda: token, self.now)
        for other in self.scripts:
            if other != name and other not in self.dead:
                delay = self.chance.uniform(0.03, 5) if self.chance.random() < 0.2 else 0.1
                self.at(self.now + delay, lambda other=other: self._link(name, other))  # type: ignore[misc]

    def form_anew(self, name: str, members: tuple[str, ...]) -> None:
        """Have a member of an earlier group wait again."""
        if name in self.dead:
            return
        linked = sorted(peer for left, peer in self._links if left == name)
        awaited = [peer for peer in members if peer in linked]
        token = self.chance.randbytes(4)
        self.scripts[name] = self.make(name, None, lambda: token, self.now, awaited=awaited)
        self.anew.add(name)
        for peer in linked:
            if peer in self.anew or peer not in members:
                self._greet(name, peer)
            self._greet(peer, name)

    def _greet(self, here: str, there: str) -> None:
        self.at(self._arrival(there, here), lambda: self._meet(here, there))

    def kill(self, name: str) -> None:
        self.dead.add(name)
        for one, other in sorted(pair for pair in self._links if pair[0] == name):
            self._links -= {(one, other), (other, one)}
            self.at(self._arrival(name, other), lambda other=other: self._lose(other, name))  # type: ignore[misc]

    def _link(self, one: str, other: str) -> None:
        if {one, other} & self.dead:
            return
        self._links |= {(one, other), (other, one)}
        self._greet(one, other)
        self._greet(other, one)

    def _meet(self, here: str, there: str) -> None:
        if here in self.dead:
            return
        script = self.scripts[here]
        script.meet(there, self.now, is_after=there in self.anew)
        self._act(here)

    def _lose(self, here: str, name: str) -> None:
        if here not in self.dead:
            self.scripts[here].lose(name, self.now)
            self._act(here)

    def _deliver(self, sender: str, to: str, message: FormingMessage) -> None:
        self.delivered += 1
        if self.delivered == self.fatal:
            self.kill(self.chance.choice([sender, to]))
        if to not in self.dead:
            self.scripts[to].receive(sender, message, self.now)
            self._act(to)

    def _act(self, name: str) -> None:
        script = self.scripts[name]
        script.check(self.now)
        sent, script.due = script.due, []
        for to, message in sent:
            if (name, to) in self._links:
                self.at(
                    self._arrival(name, to),
                    lambda to=to, message=message: self._deliver(name, to, message),  # type: ignore[misc]
                )
        if script.state is State.CLOSED:
            self.ready_at.setdefault(name, self.now)
        elif (wake_at := script.wake_at()) < LONG_SECONDS:
            self.at(max(wake_at, self.now), lambda: self._wake(name))

    def _wake(self, name: str) -> None:
        if name not in self.dead and self.scripts[name].wake_at() <= self.now:
            self._act(name)

    def _arrival(self, sender: str, to: str) -> float:
        """When what is sent now arrives: links keep the order."""
        delay = self.chance.uniform(0.0005, 0.05)
        at = max(self.now + delay, self._arrives.get((sender, to), 0.0))
        self._arrives[sender, to] = at
        return at


def faults(seed: int, make: type[Forming] = Forming) -> list[str]:
    """Return what is wrong at the end of one history."""
    chance = random.Random(seed)  # noqa: S311  repeatable, not secret
    size = chance.randint(2, 7)
    names = [f"{chance.getrandbits(32):08x}" for _ in range(size + chance.randint(0, 3))]
    world = World(chance, size, make)
    for name in names:
        world.at(chance.uniform(0, 2), lambda name=name: world.start(name))  # type: ignore[misc]
    if chance.random() < 0.4:
        world.fatal = chance.randint(1, 4 * size)
    world.run()
    living = {name: script for name, script in world.scripts.items() if name not in world.dead}
    groups = {script.closed for script in living.values() if script.closed is not None}
    found = ["they talk without end"] * world.is_endless
    if len(groups) > 1:
        found.append(f"{len(groups)} groups live")
    if not groups and len(living) >= size:
        found.append("no group lives")
    for group in groups:
        missing = [name for name in group.members if name in living and not living[name].closed]
        found += [f"{name} does not know that it is a member" for name in missing]
        late = [name for name in living if name not in group.members]
        found += [f"{name} does not know the members" for name in late if not living[name].full]
    return found


def faults_anew(seed: int) -> list[str]:
    """Return what is wrong after a group has lost a member and met again, with others waiting."""
    chance = random.Random(seed)  # noqa: S311  repeatable, not secret
    size = chance.randint(3, 6)
    names = [f"{chance.getrandbits(32):08x}" for _ in range(size + chance.randint(0, 2))]
    world = World(chance, size)
    for name in names:
        world.at(chance.uniform(0, 1), lambda name=name: world.start(name))  # type: ignore[misc]
    world.run(20.0)
    (group,) = {script.closed for script in world.scripts.values() if script.closed is not None}
    victim, *survivors = chance.sample(group.members, size)
    world.at(world.now, lambda: world.kill(victim))
    for name in survivors:
        at = world.now + chance.uniform(0, 3)
        world.at(at, lambda name=name: world.form_anew(name, group.members))  # type: ignore[misc]
    if chance.random() < 0.4:
        world.fatal = world.delivered + chance.randint(1, 4 * size)
    world.run()
    living = {name: script for name, script in world.scripts.items() if name not in world.dead}
    if world.is_endless or len(living) < 2:
        return ["they talk without end"] * world.is_endless
    groups = {script.closed for script in living.values()}
    if len(groups - {None}) != 1:
        return [f"{len(groups - {None})} groups live: {groups}"]
    return [
        f"{name} is left out" for name in living if name in survivors and not living[name].closed
    ]


class Unsettled(Forming):
    def _propose_at(self) -> float:
        return super()._propose_at() - SETTLE_SECONDS


class Silent(Forming):
    """A member passes on nothing; only the proposer says that the round is closed."""

    def _close(self, closed: Closed) -> None:
        was_proposing = self.state is State.PROPOSING
        sent = len(self.due)
        super()._close(closed)
        if not was_proposing:
            del self.due[sent:]


class Untold(Forming):
    """A script does not pass on the names of others."""

    def _send(self, peer: str, message: FormingMessage) -> None:
        if not isinstance(message, Waits):
            super()._send(peer, message)


class Open(Forming):
    """A group does not say that it is full."""

    def _send(self, peer: str, message: FormingMessage) -> None:
        if not isinstance(message, Full):
            super()._send(peer, message)


class Promiscuous(Forming):
    """A script agrees with every proposal."""

    def _answer(self, now: float) -> None:  # noqa: ARG002  as it is called
        for proposer, number in self._asked.items():
            self._send(proposer, Agree(number=number))
        self._asked.clear()


class Stubborn(Forming):
    """A proposer does not give up its round when a member is gone."""

    def lose(self, peer: str, now: float) -> None:
        if self.state is not State.PROPOSING:
            super().lose(peer, now)


WITHOUT: Final[Mapping[type[Forming], int]] = {
    Unsettled: 84,
    Silent: 2186,
    Untold: 966,
    Open: 0,
    Promiscuous: 2842,
    Stubborn: 604,
}
"""Each without a rule that is needed, and the history that shows it. `stress.mesh` finds others."""
