"""Which peers answer: probes, their time-outs, and what clears them. No I/O and no clock.

    UNKNOWN     no probe has been judged yet
    HEALTHY     it has answered the last probe
    DEGRADED    a probe has got no answer: other peers are asked to probe it, too
    UNHEALTHY   so many probes in a row have got none that it is lost: the owner removes it
    REMOVED     lost, or left: no peer any more

A failure is a probe that got no answer within its time-out. Anything that an authenticated peer
sends is an answer to every probe that is older. "Nothing heard for so long" is no failure: this
process may have been stopped itself, and then it has not listened.

Over TCP a lost packet holds up all that is sent after it, and may do so for half a minute. So the
first failure of a peer has others probe it, over links of their own, as in SWIM
(https://www.cs.cornell.edu/projects/Quicksilver/public_pdfs/SWIM.pdf). Without them 10 nodes that
lose a fifth of their packets remove 41 peers a day that run (`stress/health.py`).

A peer that dies right after an answer is lost after `every + timeout + (failures - 1) * every` at
the latest: 30 s by default, 4.5 s with the fast preset. Among more than 17 nodes the first probe
comes at a random time, and so later.
"""

import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Final

from muster.contracts.errors import move
from muster.mesh.messages import Message, Probe, ProbeFor, Reached

LATENCY_WEIGHT: Final = 0.2
"""Of the newest answer in the moving average."""

LATE_SECONDS: Final = 1.0
"""A check that comes so much later than it was due: this process was stopped, not its peers."""

HELPERS: Final = 3
"""Other peers that are asked at each failure."""

ALL_LIMIT: Final = 16
SAMPLE: Final = 8
"""With more than 16 peers about 8 of those that seem well are probed in a period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """How soon a peer that does not answer is lost."""

    every_seconds: float
    timeout_seconds: float
    failures: int


PRESETS: Final[Mapping[str, Preset]] = {
    "default": Preset(every_seconds=5.0, timeout_seconds=15.0, failures=3),
    "fast": Preset(every_seconds=0.5, timeout_seconds=2.0, failures=5),
    "slow": Preset(every_seconds=10.0, timeout_seconds=30.0, failures=3),
}


class Condition(StrEnum):
    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"
    REMOVED = "removed"


_MOVES: Final[Mapping[Condition, frozenset[Condition]]] = {
    Condition.UNKNOWN: frozenset(Condition) - {Condition.UNKNOWN},
    Condition.HEALTHY: frozenset({Condition.DEGRADED, Condition.UNHEALTHY, Condition.REMOVED}),
    Condition.DEGRADED: frozenset({Condition.HEALTHY, Condition.UNHEALTHY, Condition.REMOVED}),
    Condition.UNHEALTHY: frozenset({Condition.REMOVED}),
    Condition.REMOVED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """A peer has come into another condition."""

    peer: str
    condition: Condition


@dataclass(frozen=True, slots=True)
class Due:
    """What the owner has to do now."""

    probed: tuple[str, ...] = ()
    """Peers to be probed."""
    lost: tuple[str, ...] = ()
    """Peers that are unhealthy, to be removed."""
    indirect: tuple[tuple[str, str], ...] = ()
    """Pairs (helper, subject): the helper is to be asked to probe the subject."""


@dataclass(slots=True)
class PeerHealth:
    """What is known of one peer. Only `Health` changes it."""

    due_at: float
    condition: Condition = Condition.UNKNOWN
    open: deque[float] = field(default_factory=deque)
    """When the probes without an answer were sent."""
    missed: list[float] = field(default_factory=list)
    """When those were sent that had none in time; an answer forgives the older ones."""
    answered: int = 0
    failed: int = 0
    """All probes so far, without those that are open or that a stop of this process ended."""
    latency_seconds: float | None = None
    """The moving average; None before any answer to a probe."""

    @property
    def uptime_ratio(self) -> float:
        """The part of all probes that was answered in time; 1.0 before any."""
        return 1.0 - self.failed / max(self.answered + self.failed, 1)


@dataclass(frozen=True, slots=True)
class Summary:
    """All peers of one process."""

    counts: Counter[Condition]
    """How many peers are in each condition."""
    latency_seconds: float | None
    """The mean over the peers that have answered a probe; None without any."""

    @property
    def is_healthy(self) -> bool:
        """True if no peer is unhealthy; one that is unknown counts as operational."""
        return not self.counts[Condition.UNHEALTHY]


class Health:
    """The peers of one process. Read all sockets before `check`, or a woken process blames them."""

    def __init__(self, preset: Preset, chance: random.Random) -> None:
        """`chance` chooses helpers, and whom to probe among many."""
        self.peers: dict[str, PeerHealth] = {}
        self.events: list[HealthEvent] = []
        """What has happened; the owner empties it."""
        self._preset = preset
        self._chance = chance
        self._askers: dict[str, dict[str, float]] = {}
        """By subject: who has asked this process to probe it, and when by the asker's clock."""

    # What happens

    def add(self, peer: str, now: float) -> None:
        self.peers[peer] = PeerHealth(due_at=now + self._preset.every_seconds)

    def remove(self, peer: str) -> None:
        self._askers.pop(peer, None)
        if state := self.peers.pop(peer, None):
            self._move(peer, state, Condition.REMOVED)

    def receive(self, peer: str, message: Message, now: float) -> list[tuple[str, Message]]:
        """Take a message of an authenticated peer, and return what is to be sent, and to whom."""
        self.answered(peer)
        due: list[tuple[str, Message]] = []
        for asker, asked_at in self._askers.pop(peer, {}).items():
            due.append((asker, Reached(subject=peer, asked_at=asked_at)))
        match message:
            case Probe(is_answer=True, sent_at=sent_at):
                self.measure(peer, now - sent_at)
            case Probe(sent_at=sent_at):
                due.append((peer, Probe(sent_at=sent_at, is_answer=True)))
            case ProbeFor(subject=subject, asked_at=asked_at) if subject in self.peers:
                self._askers.setdefault(subject, {})[peer] = asked_at
                due.append((subject, Probe(sent_at=now)))
            case Reached(subject=subject, asked_at=asked_at):
                self.answered(subject, asked_at)
            case _:
                pass
        return due

    def answered(self, peer: str, at: float = float("inf")) -> None:
        """Take a sign of life: anything that an authenticated peer has sent.

        A peer that answers through a helper was alive `at` the time when the helper was asked:
        that is no answer to later probes.
        """
        state = self.peers.get(peer)
        if state is not None and state.condition is not Condition.UNHEALTHY:
            self._clear(state, at)
            self._judge(peer, state)

    def measure(self, peer: str, seconds: float) -> None:
        """Take the time from a probe to its answer."""
        if state := self.peers.get(peer):
            before = seconds if state.latency_seconds is None else state.latency_seconds
            state.latency_seconds = before + LATENCY_WEIGHT * (seconds - before)

    def check(self, now: float) -> Due:
        """Judge the probes that are open, and return what is to be done."""
        if now > self.wake_at() + LATE_SECONDS:
            self._shift(now)
        failing = [peer for peer, state in self.peers.items() if self._expire(peer, state, now)]
        lost = [peer for peer in failing if self.peers[peer].condition is Condition.UNHEALTHY]
        asked = [(each, peer) for peer in failing for each in self._helpers() if peer not in lost]
        few = SAMPLE if len(self.peers) > ALL_LIMIT else len(self.peers)
        probed = []
        for peer, state in self.peers.items():
            if now < state.due_at or peer in lost:
                continue
            state.due_at = now + self._preset.every_seconds
            # One that seems ill is probed in any case.
            if state.open or state.missed or self._chance.random() * len(self.peers) < few:
                state.open.append(now)
                probed.append(peer)
        return Due(tuple(probed), tuple(lost), tuple(asked))

    # What is known

    def wake_at(self) -> float:
        """When `check` is due; infinity without peers."""
        timeout = self._preset.timeout_seconds
        times = [state.due_at for state in self.peers.values()]
        times += [state.open[0] + timeout for state in self.peers.values() if state.open]
        return min(times, default=float("inf"))

    def summary(self) -> Summary:
        """Return what is known of all peers; any thread may ask."""
        peers = list(self.peers.values())
        known = [each.latency_seconds for each in peers if each.latency_seconds is not None]
        return Summary(Counter(each.condition for each in peers), fmean(known) if known else None)

    # What follows

    def _clear(self, state: PeerHealth, at: float) -> None:
        while state.open and state.open[0] <= at:
            state.open.popleft()
            state.answered += 1
        state.missed = [sent for sent in state.missed if sent > at]

    def _expire(self, peer: str, state: PeerHealth, now: float) -> bool:
        """Return whether a probe has failed."""
        before = state.failed
        while state.open and now >= state.open[0] + self._preset.timeout_seconds:
            state.missed.append(state.open.popleft())
            state.failed += 1
        if state.failed > before:
            self._judge(peer, state)
        return state.failed > before

    def _judge(self, peer: str, state: PeerHealth) -> None:
        if len(state.missed) >= self._preset.failures:
            self._move(peer, state, Condition.UNHEALTHY)
        elif state.missed:
            self._move(peer, state, Condition.DEGRADED)
        elif state.answered:
            self._move(peer, state, Condition.HEALTHY)

    def _move(self, peer: str, state: PeerHealth, target: Condition) -> None:
        if target is not state.condition:
            state.condition = move(_MOVES, state.condition, target)
            self.events.append(HealthEvent(peer, target))

    def _helpers(self) -> list[str]:
        well = [peer for peer, state in self.peers.items() if state.condition is Condition.HEALTHY]
        return self._chance.sample(well, min(HELPERS, len(well)))

    def _shift(self, now: float) -> None:
        """Judge no probe that was open while this process was stopped; probe all anew."""
        for state in self.peers.values():
            state.open.clear()
            state.due_at = now
