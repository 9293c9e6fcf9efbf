"""Histories of scripts that start, find each other, form groups, and die at any moment."""

import heapq
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, TypeAlias

from muster.mesh.forming import (
    SETTLE_SECONDS,
    Agree,
    Closed,
    Forming,
    FormingMessage,
    Full,
    Release,
    State,
    Waits,
)

LONG_SECONDS = 50.0
LATE_SECONDS = 2.7
"""When the last link is made: a name that is passed on is kept for 3 s."""


@dataclass
class World:
    """Scripts that form groups of `size`, with links, delays and a clock."""

    chance: random.Random
    size: int
    make: type[Forming] = Forming
    delay: float = 0.05
    """Seconds that a message takes at most, but for one in ten."""
    late: float = 0.2
    """The part of all links that is made late."""
    now: float = 0.0
    fatal: set[int] = field(default_factory=set)
    """The messages with which one of their two ends dies; `Waits` is not counted."""
    delivered: int = 0
    is_endless: bool = False
    """They have talked too much."""
    scripts: dict[str, Forming] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    ready_at: dict[str, float] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    """What each script has waited for, counted; above 1 after a group that it was in."""
    _heard: dict[tuple[str, str], int] = field(default_factory=dict)
    _left: dict[tuple[str, str], int] = field(default_factory=dict)
    """The turn of another script, as one has heard it last, and in its last group."""
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: "count[int]" = field(default_factory=count)
    _links: dict[tuple[str, str], int] = field(default_factory=dict)
    """The number of the link, by both of its ends: what was sent over an earlier one is lost."""
    _wakes: dict[str, float] = field(default_factory=dict)
    _arrives: dict[tuple[str, str], float] = field(default_factory=dict)
    _until: dict[tuple[str, str], float] = field(default_factory=dict)
    """When the last word of one that dies arrives; what it has said later is lost."""

    def at(self, seconds: float, do: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), partial(do, *args)))

    def run(self, until: float = LONG_SECONDS) -> None:
        for _ in range(20_000):
            if not self._events or self._events[0][0] > until:
                self.now = until
                return
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.is_endless = True

    def start(self, name: str) -> None:
        self._wait(name, self.size)
        for number, other in enumerate(self.scripts):
            # The first one is linked to all soon, so that names can be passed on.
            is_late = number > 0 and self.chance.random() < self.late
            delay = self.chance.uniform(0.03, LATE_SECONDS) if is_late else 0.1
            self.at(self.now + delay, self.link, name, other)

    def form_anew(self, name: str, members: tuple[str, ...]) -> None:
        """Have a member of an earlier group wait again."""
        if name in self.dead:
            return
        linked = self._linked(name)
        self.ready_at.pop(name, None)
        self._wait(name, None, [peer for peer in members if peer in linked])
        for peer in linked:
            self._greet(peer, name)
            self._meet(name, peer, self._heard.get((name, peer), 0))

    def kill(self, name: str) -> None:
        self.dead.add(name)
        self.part(name)

    def part(self, name: str) -> None:
        """Cut the links of a script."""
        for other in self._linked(name):
            self._until[name, other] = self.chance.uniform(self.now, self.now + self.delay)
            del self._links[name, other], self._links[other, name]
            self.at(self._arrival(name, other), self._lose, other, name)
            self.at(self._arrival(other, name), self._lose, name, other)

    def link(self, one: str, other: str) -> None:
        if {one, other} & self.dead or one == other:
            return
        self._links[one, other] = self._links[other, one] = next(self._order)
        self._until.pop((one, other), None)
        self._until.pop((other, one), None)
        self._greet(one, other)
        self._greet(other, one)

    def renew(self) -> None:
        """Have two scripts use another link: what was sent is lost, and each notices later."""
        if not self._links:
            return
        one, other = self.chance.choice(sorted(self._links))
        self._links[one, other] = self._links[other, one] = next(self._order)
        for here, there in (one, other), (other, one):
            self.at(self.now + self.chance.uniform(0, 0.5), self._renew, here, there)

    def _wait(self, name: str, size: int | None, awaited: Collection[str] = ()) -> None:
        token = self.chance.randbytes(4)
        self.scripts[name] = self.make(name, size, lambda: token, self.now, awaited=awaited)
        self.turns[name] = self.turns.get(name, 0) + 1

    def _linked(self, name: str) -> list[str]:
        return sorted(peer for left, peer in self._links if left == name)

    def _greet(self, here: str, there: str) -> None:
        self.at(self._arrival(there, here), self._meet, here, there, self.turns[there])

    def _waits_now(self, here: str, there: str) -> bool:
        return self._heard.get((here, there), 0) > self._left.get((here, there), 0)

    def _meet(self, here: str, there: str, turn: int) -> None:
        if here in self.dead or (here, there) not in self._links:
            return
        script = self.scripts[here]
        self._heard[here, there] = max(turn, self._heard.get((here, there), 0))
        if self._waits_now(here, there):
            script.meet(there, self.now, is_after=turn > 1)
        elif script.closed and there in script.closed.members:
            script.due.append((there, script.closed))
        self._act(here)

    def _renew(self, here: str, there: str) -> None:
        if (here, there) in self._links:
            self.scripts[here].lose(there, self.now, is_renewed=True)
            self._greet(there, here)
            self._meet(here, there, self._heard.get((here, there), 0))

    def _lose(self, here: str, name: str) -> None:
        if here not in self.dead and (here, name) not in self._links:
            self.scripts[here].lose(name, self.now)
            self._act(here)

    def _deliver(self, sender: str, to: str, link: int, message: FormingMessage) -> None:
        is_cut = self.now > self._until.get((sender, to), self.now)
        if is_cut or self._links.get((sender, to), link) != link:
            return
        self.delivered += not isinstance(message, Waits)
        if self.delivered in self.fatal:
            self.fatal.remove(self.delivered)
            self.kill(self.chance.choice([sender, to]))
        if to not in self.dead and self._waits_now(to, sender):
            self.scripts[to].receive(sender, message, self.now)
            self._act(to)

    def _act(self, name: str) -> None:
        script = self.scripts[name]
        script.check(self.now)
        sent, script.due = script.due, []
        for to, message in sent:
            if link := self._links.get((name, to)):
                self.at(self._arrival(name, to), self._deliver, name, to, link, message)
        if script.closed is None:
            wake_at = max(script.wake_at(), self.now)
            if wake_at < LONG_SECONDS and not self.now < self._wakes.get(name, 0.0) <= wake_at:
                self._wakes[name] = wake_at
                self.at(wake_at, self._wake, name)
        elif name not in self.ready_at:
            self.ready_at[name] = self.now
            for member in script.closed.members:
                self._left[name, member] = self._heard.get((name, member), self.turns[member])

    def _wake(self, name: str) -> None:
        self._wakes.pop(name, None)
        if name not in self.dead:
            self._act(name)

    def _arrival(self, sender: str, to: str) -> float:
        """When what is sent now arrives: links keep the order."""
        longest = 0.8 if self.chance.random() < 0.1 else self.delay
        delay = self.chance.uniform(0.0005, longest)
        at = max(self.now + delay, self._arrives.get((sender, to), 0.0))
        self._arrives[sender, to] = at
        return at


def _begin(seed: int, make: type[Forming], fewest: int) -> tuple[World, list[str]]:
    """Return a world whose scripts start, and its names."""
    chance = random.Random(seed)  # noqa: S311  repeatable, not secret
    size = max(fewest, chance.choice([2, 2, 2, 3, 4, 5, 6, 7]))
    names = [f"{chance.getrandbits(32):08x}" for _ in range(size + chance.randint(0, 3))]
    delay, late = chance.choice([0.05, 0.05, 0.3]), chance.choice([0.2, 0.6])
    world = World(chance, size, make, delay, late)
    longest = chance.choice([1, 2, 8])
    for name in names:
        world.at(chance.uniform(0, longest), world.start, name)
    return world, names


def _disturb(world: World, seconds: float) -> None:
    """Have scripts die, and links change, within a time."""
    chance, first = world.chance, world.delivered + 1
    if chance.random() < 0.4:
        deaths = chance.randint(1, 3)
        world.fatal = {chance.randrange(first, first + 4 * world.size) for _ in range(deaths)}
    for _ in range(chance.randint(0, 2)):
        world.at(world.now + chance.uniform(0, seconds), world.renew)


def _judge(world: World, least: int) -> list[str]:
    living = {name: script for name, script in world.scripts.items() if name not in world.dead}
    groups = {script.closed for script in living.values() if script.closed is not None}
    found = ["they talk without end"] * world.is_endless
    if len(groups) > 1:
        found.append(f"{len(groups)} groups live")
    if not groups and len(living) >= least:
        found.append("no group lives")
    for group in groups:
        missing = [name for name in group.members if name in living and not living[name].closed]
        found += [f"{name} does not know that it is a member" for name in missing]
        late = [name for name in living if name not in group.members]
        found += [f"{name} does not know the members" for name in late if not living[name].full]
    return found


def faults(seed: int, make: type[Forming] = Forming) -> list[str]:
    """Return what is wrong at the end of one history."""
    world, _ = _begin(seed, make, 2)
    _disturb(world, 6)
    world.run()
    return _judge(world, world.size)


def faults_anew(seed: int, make: type[Forming] = Forming) -> list[str]:
    """Return what is wrong after a group has lost members and met again, with others waiting.

    In half of the histories the first one that is lost comes back, when the others have become a
    group or are about to; then all of these meet anew.
    """
    world, names = _begin(seed, make, 3)
    chance = world.chance
    world.run(20.0)
    if len(groups := {script.closed for script in world.scripts.values()} - {None}) != 1:
        return _judge(world, world.size)
    (group,) = groups
    assert group is not None
    victim, *survivors = chance.sample(group.members, world.size)
    returns = chance.random() < 0.5
    world.part(victim) if returns else world.kill(victim)
    _meet_anew(world, [victim, *survivors] if returns else survivors)
    _disturb(world, 3)
    if returns:
        back_at = world.now + chance.uniform(1, 8)
        for other in names:
            world.at(back_at + chance.uniform(0, 0.5), world.link, victim, other)
        world.run(35.0)
        world.fatal = set()
        _meet_anew(world, [name for name in world.ready_at if name not in world.dead])
    world.run()
    earlier = [name for name in names if world.turns[name] > 1 and name not in world.dead]
    left_out = [] if returns else [name for name in earlier if not world.scripts[name].closed]
    found = [f"{name} is left out" for name in left_out if len(earlier) > 1]
    return found + _judge(world, 2 if earlier else world.size)


def _meet_anew(world: World, members: list[str]) -> None:
    for name in members:
        world.at(world.now + world.chance.uniform(0, 3), world.form_anew, name, tuple(members))


class WithoutSettling(Forming):
    """A script proposes at once."""

    def _propose_at(self) -> float:
        return super()._propose_at() - SETTLE_SECONDS


class WithoutPassingOn(Forming):
    """A member passes on nothing; only the proposer says that the round is closed."""

    def _close(self, closed: Closed) -> None:
        was_proposing = self.state is State.PROPOSING
        sent = len(self.due)
        super()._close(closed)
        if not was_proposing:
            del self.due[sent:]


class _Silent(Forming):
    unsaid: type[FormingMessage]

    def _send(self, peer: str, message: FormingMessage) -> None:
        if not isinstance(message, self.unsaid):
            super()._send(peer, message)


class WithoutNames(_Silent):
    """A script does not pass on the names of others."""

    unsaid = Waits


class WithoutFull(_Silent):
    """A group does not say that it is full."""

    unsaid = Full


class WithoutEnd(Forming):
    """A script waits for a group although the members that have said so are gone."""

    def lose(self, peer: str, now: float, *, is_renewed: bool = False) -> None:
        living = dict(self._living)
        super().lose(peer, now, is_renewed=is_renewed)
        self._living = living


class WithoutPromise(Forming):
    """A script agrees with every proposal."""

    def check(self, now: float) -> None:
        for proposer, number in self._asked.items():
            self._send(proposer, Agree(number=number))
        self._asked.clear()
        super().check(now)


class WithoutGivingUp(Forming):
    """A proposer keeps its round although a lower name is known, or a group lives."""

    def _is_turn(self) -> bool:
        return self.state is State.PROPOSING or super()._is_turn()


class WithoutRelease(_Silent):
    """A proposer does not say that it has given up its round."""

    unsaid = Release


class WithoutLoss(Forming):
    """A proposer does not give up its round when a member is gone."""

    def lose(self, peer: str, now: float, *, is_renewed: bool = False) -> None:
        if self.state is not State.PROPOSING:
            super().lose(peer, now, is_renewed=is_renewed)


class WithoutAwaiting(Forming):
    """A member that has not called yet is not awaited over another link."""

    def lose(self, peer: str, now: float, *, is_renewed: bool = False) -> None:  # noqa: ARG002
        super().lose(peer, now)


class WithoutLead(Forming):
    """Scripts of an earlier group do not go before all others."""

    def _turn(self, script: str) -> tuple[bool, str]:
        return True, script


History: TypeAlias = tuple[Callable[[int, type[Forming]], list[str]], int]

WITHOUT: Final[Mapping[type[Forming], History]] = {
    WithoutSettling: (faults, 31),
    WithoutPassingOn: (faults, 79),
    WithoutNames: (faults, 147),
    WithoutFull: (faults, 0),
    WithoutEnd: (faults_anew, 0),
    WithoutPromise: (faults, 126),
    WithoutGivingUp: (faults_anew, 49),
    WithoutRelease: (faults, 12),
    WithoutLoss: (faults, 12),
    WithoutAwaiting: (faults_anew, 893),
    WithoutLead: (faults_anew, 87),
}
"""Each without a rule that is needed, and the history that shows it. `stress.mesh` finds others."""
