"""Which node of a household leads. No I/O and no clock.

    IDLE          knows no master, and does not campaign
    CAMPAIGNING   asks all for a master, and offers to lead
    MASTER        leads, and says so every second
    FOLLOWER      has heard of a master that lives

The node that is up for longest is the best. A master stays until it meets a better *master*. News
of another one counts only as the answer to a question of our own, and proves that it lived when we
asked: beats may come late, after its death. All rules: `docs/internals/election.md`. The campaign
is a bully algorithm (https://en.wikipedia.org/wiki/Bully_algorithm) by age, epochs are Lamport's
clocks (https://en.wikipedia.org/wiki/Lamport_timestamp).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from random import Random
from typing import Final, Literal, TypeAlias

import msgspec

from muster.contracts.errors import move

BEAT_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 3.0  # before a master is lost, and after a campaign without result
DOUBT_SECONDS: Final = 2.0  # of silence before a follower asks, as one without a link has to
DELAY_SECONDS: Final = 0.2  # from the loss of a master to the call
COLLECTING_SECONDS: Final = 0.6  # for answers to a call: with 3 s, elections take more than 6 s
QUESTION_SECONDS: Final = 0.5  # between two, while a node waits for a master
AUDIENCE_LIMIT: Final = 16  # that are asked and told, at random; a beat goes to each node
PATIENCE_SECONDS: Final = 2.0  # for the answer of each node but the lost master
LOOK_SECONDS: Final = 0.1  # between two looks whether all have answered
CLOCK_LIMIT_SECONDS: Final = 3600.0  # by which the clocks of two members may differ


Rank: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
"""Which rows a node has: the last that was written with a majority, and the last. Each is an epoch
and a number."""


class Mastership(msgspec.Struct, frozen=True, array_like=True):
    """What a master says of itself, and others say of it."""

    node: str
    session: int
    epoch: int
    start: float
    beat: int  # counts the signs of life
    majority: tuple[int, int] = (0, 0)  # of its last row that was written with a majority

    @property
    def rank(self) -> tuple[tuple[int, int], float, str]:
        """The greater one leads."""
        return self.majority, -self.start, self.node

    def is_of(self, other: "Mastership | None") -> bool:
        """Return whether both are of one session of one node."""
        return other is not None and (self.node, self.session) == (other.node, other.session)


class Candidate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How a node compares with others that would lead."""

    start: float  # of its session, in seconds since 1970 by the clock of the cluster
    copy: Rank

    def rank(self, node: str) -> tuple[Rank, float, str]:
        """The greatest one leads."""
        return self.copy, -self.start, node


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What each message says of its sender."""

    session: int
    clock: int  # the highest epoch that it has seen
    time: float  # in seconds since 1970, by its clock of the cluster
    is_new: bool  # it has not met any node before, so this is its own clock


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask", omit_defaults=True):
    """Who is master?"""

    head: Head
    nonce: int
    candidate: Candidate | None = None  # in a call: it leads unless a better one answers


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report", omit_defaults=True):
    """The answer to a question; a beat of the master; news of another master."""

    head: Head
    nonce: int = 0  # of the question; 0 without one
    mastership: Mastership | None = None
    age_seconds: float = 0.0  # since the sender knew that this master lived
    candidate: Candidate | None = None  # what the sender is, if it may lead


class Outdated(msgspec.Struct, frozen=True, kw_only=True, tag="outdated", omit_defaults=True):
    """The receiver had the session `known`: its counter comes from a backup."""

    head: Head
    known: int


ElectionMessage: TypeAlias = Ask | Report | Outdated


class State(StrEnum):
    IDLE = "idle"
    CAMPAIGNING = "campaigning"
    MASTER = "master"
    FOLLOWER = "follower"


_MOVES: Final[Mapping[State, frozenset[State]]] = {
    State.IDLE: frozenset({State.CAMPAIGNING, State.FOLLOWER}),
    State.CAMPAIGNING: frozenset({State.IDLE, State.MASTER, State.FOLLOWER}),
    State.MASTER: frozenset({State.IDLE, State.CAMPAIGNING, State.FOLLOWER}),
    State.FOLLOWER: frozenset({State.IDLE, State.CAMPAIGNING}),
}


EventKind: TypeAlias = Literal["started", "elected", "new_master", "timeout", "split_brain"]
"""A campaign; this node leads; another one; silence, or a campaign without result; both lead."""


class Event(msgspec.Struct, frozen=True):
    """What an owner may log and count."""

    kind: EventKind
    node: str  # that it is about
    epoch: int


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What a node keeps on its disk."""

    session: int = 0
    clock: int = 0


NO_ROWS: Final[Rank] = (0, 0), (0, 0)


class Due(msgspec.Struct, frozen=True):
    """What the owner has to do, in this order."""

    stored: Stored | None  # durable before anything is sent; None if it has not changed
    messages: list[tuple[str, ElectionMessage]]
    events: list[Event]


def is_clock_credible(offsets_seconds: Collection[float]) -> bool:
    """Whether a node may lead whose clock differs by these from the members that it hears.

    It counts itself: of two nodes neither is in the minority, and the one that leads goes on.
    """
    distant = sum(abs(offset) > CLOCK_LIMIT_SECONDS for offset in offsets_seconds)
    return 2 * distant <= len(offsets_seconds) + 1


class Election:
    """One session of one node. Read all sockets before `check`, as for `health`."""

    def __init__(self, own: str, stored: Stored, wall: float, now: float, chance: Random) -> None:
        """Begin a session; a process that was stopped for more than 15 s begins another one.

        `wall` is the time of day in seconds since 1970. `now`, here and below, is of a clock that
        never jumps and runs while the machine sleeps. `chance` selects nodes where there are many.
        """
        self.state = State.IDLE
        self.accepted: Mastership | None = None  # of another node, as heard last
        self.session = stored.session + 1
        self.clock = self.epoch = stored.clock  # the highest that was seen, and accepted
        self.copy: Rank | None = NO_ROWS  # of this node; None while rows still come; by the owner
        self._own, self._chance, self._stored = own, chance, stored
        self._began_at, self._offset = now, wall - now
        self._may_lead = self._is_new = True
        self._peers: set[str] = set()
        self._sessions: dict[str, int] = {}
        self._nonce = chance.getrandbits(32)  # an answer to an earlier session counts for none
        self._questions: dict[int, float] = {}  # when each was asked
        self._asked_at = self._heard_at = now
        self._call_nonce = self._beat_number = 0
        self._candidates: dict[str, Candidate] = {}  # that have answered the call
        self._silent: set[str] = set()  # that have not
        self._called_at = now
        self.lost = ""  # the last master, if it was lost
        self._rival = ""  # the other master that the owner has heard of
        self._messages: list[tuple[str, ElectionMessage]] = []
        self._events: list[Event] = []
        self._rest(now)

    @property
    def master(self) -> str | None:
        """The node that leads, as far as this one knows."""
        return said.node if (said := self._mastership()) else None

    def meet(self, node: str, now: float) -> None:
        """Another node is linked."""
        self._peers.add(node)
        self._ask([node], now)

    def lose(self, node: str, now: float) -> None:  # noqa: ARG002
        """A node is not linked any more. Others may still hear it, so a master has its silence."""
        self._peers.discard(node)

    def permit(self, now: float, *, may_lead: bool) -> None:
        """Say whether this node may lead. A master that may not gives up."""
        is_changed, self._may_lead = may_lead != self._may_lead, may_lead
        if is_changed and self.state is not State.FOLLOWER:
            self._rest(now)

    def receive(self, node: str, message: ElectionMessage, now: float) -> None:
        """Take a message of a linked node."""
        if not self._note(node, message, now):
            return
        self._expire(now)
        match message:
            case Ask():
                # It says no mastership: a worse master that raised here would race with a better.
                self._answer(node, message, now)
            case Report():
                self._raise(message.mastership, now)
                self._weigh(node, message, now)
            case Outdated(known=known) if known > self.session:
                self.session = known + 1

    def check(self, now: float) -> None:
        """Do what is due. Call it at `wake_at`, and after anything has happened."""
        self._expire(now)
        if now >= self._step_at:
            self._step(now)
        if now >= self._question_at():
            self._asked_at = now
            self._ask(self._audience(), now)

    def wake_at(self) -> float:
        """When `check` is to be called."""
        return min(self._step_at, self._question_at())

    def take(self) -> Due:
        """Return what the owner has to do now, once."""
        stored = Stored(session=self.session, clock=self.clock)
        due = Due(stored if stored != self._stored else None, self._messages, self._events)
        self._stored, self._messages, self._events = stored, [], []
        return due

    def _plan(self, at: float, step: Callable[[float], None]) -> None:
        self._step_at, self._step = at, step

    def _question_at(self) -> float:
        if self.state is State.MASTER:
            return float("inf")
        if self.state is State.FOLLOWER:
            return max(self._heard_at + DOUBT_SECONDS, self._asked_at + QUESTION_SECONDS)
        return self._asked_at + (QUESTION_SECONDS if self._may_lead else SILENCE_SECONDS)

    def _rest(self, now: float) -> None:
        """Know no master, and campaign after silence, if at all."""
        if self.state is not State.IDLE:
            self._move(State.IDLE)
        self.lost = self.accepted.node if self.accepted else ""
        self.accepted = None
        self._plan(now + SILENCE_SECONDS if self._may_lead else float("inf"), self._campaign)

    def _expire(self, now: float) -> None:
        """Forget a master that is silent or in a new session, and after a stop that one leads."""
        # Others have replaced a master that was stopped: it asks before it leads again.
        is_over = self.state is State.MASTER and now >= self._step_at + SILENCE_SECONDS
        if (followed := self.accepted) is not None:
            is_restarted = self._sessions[followed.node] > followed.session
            is_over = is_restarted or now >= self._step_at
        if is_over:
            self._time_out(now)

    def _time_out(self, now: float) -> None:
        self._tell_owner("timeout")
        self._rest(now)
        if self._may_lead:
            self._campaign(now)

    def _campaign(self, now: float) -> None:
        self._move(State.CAMPAIGNING)
        self._tell_owner("started")
        self._plan(now + DELAY_SECONDS, self._call)

    def _call(self, now: float) -> None:
        """Ask for a master, and for better candidates."""
        if self.copy is None:
            self._plan(now + LOOK_SECONDS, self._call)
            return
        self._candidates = {}
        self._call_nonce, self._asked_at, self._called_at = self._nonce + 1, now, now
        audience = self._audience()
        self._silent = {*audience} - {self.lost}
        self._ask(audience, now, self._candidate())
        self._plan(now + COLLECTING_SECONDS, self._decide)

    def _decide(self, now: float) -> None:
        """Lead, or wait for a better candidate that has answered."""
        own = self._candidate().rank(self._own)
        if any(other.rank(node) > own for node, other in self._candidates.items()):
            self._plan(self._called_at + SILENCE_SECONDS, self._time_out)
            return
        if self._silent & self._peers and now < self._called_at + PATIENCE_SECONDS:
            self._plan(now + LOOK_SECONDS, self._decide)  # one of them may have newer rows
            return
        self._move(State.MASTER)
        self._rival = ""
        self._begin_epoch(now)
        self._tell_owner("elected")

    def _begin_epoch(self, now: float) -> None:
        self.epoch = self.clock = self.clock + 1
        self._beat(now)

    def _beat(self, now: float) -> None:
        self._beat_number += 1
        self._plan(now + BEAT_SECONDS, self._beat)
        self._report(sorted(self._peers), now)

    def _note(self, node: str, message: ElectionMessage, now: float) -> bool:
        """Learn from the head of a message; return False if it is of an older session."""
        known = self._sessions.get(node, 0)
        if message.head.session < known:
            self._messages.append((node, Outdated(head=self._head(now), known=known)))
            return False
        self._sessions[node] = message.head.session
        self.clock = max(self.clock, message.head.clock)
        if self._is_new:
            self._is_new = False
            if not message.head.is_new or node < self._own:
                self._offset = message.head.time - now
        if isinstance(message, Report) and (said := message.mastership):
            self._sessions[said.node] = max(said.session, self._sessions.get(said.node, 0))
        return True

    def _answer(self, node: str, ask: Ask, now: float) -> None:
        if ask.candidate is not None and self._is_needed(ask.candidate.rank(node)):
            if self.state is State.IDLE:
                self._campaign(now)
            self._call(now)
        if self.copy is not None or self.state is State.FOLLOWER:  # else soon: it asks again
            self._report([node], now, ask.nonce)

    def _is_needed(self, caller: tuple[Rank, float, str]) -> bool:
        """Whether the caller will wait for this node, which has not called just now."""
        is_free = self.state in {State.IDLE, State.CAMPAIGNING} and self._step != self._decide
        return self._may_lead and is_free and self._candidate().rank(self._own) > caller

    def _raise(self, said: Mastership | None, now: float) -> None:
        """Lead in an epoch above all that were seen, unless the sender knows a better master."""
        is_better = said is not None and self._is_preferred(said)
        if self.state is State.MASTER and self.clock > self.epoch and not is_better:
            self._begin_epoch(now)

    def _weigh(self, node: str, report: Report, now: float) -> None:
        """Follow, ask, or contradict."""
        asked_at = self._questions.get(report.nonce)
        if asked_at is not None and report.nonce >= self._call_nonce:
            self._silent.discard(node)
            if report.candidate:
                self._candidates[node] = report.candidate
        said, own = report.mastership, self._mastership()
        if said is None or said.node == self._own or said.session < self._sessions[said.node]:
            return
        lived_at = float("-inf") if asked_at is None else asked_at - report.age_seconds
        if lived_at > now - SILENCE_SECONDS:
            if self.state is State.MASTER and said.node != self._rival:
                self._meet_rival(said, now)
            if said.is_of(own) or self._is_preferred(said):
                self._follow(said, lived_at, now)
        elif said.is_of(own):
            if node == said.node:
                self._follow(said, now, now)
        elif asked_at is None and (self.state is State.MASTER or self._is_preferred(said)):
            self._ask([node], now)
        self._contradict(node, said, now)

    def _meet_rival(self, said: Mastership, now: float) -> None:
        self._rival = said.node
        self._tell_owner("split_brain", said)
        if said.epoch == self.epoch and not self._is_preferred(said):
            self._begin_epoch(now)  # agents may have heard of either in this one

    def _contradict(self, node: str, said: Mastership, now: float) -> None:
        """Answer a master whose epoch is behind, and a node that has a worse master."""
        own = self._mastership()
        is_behind = node == said.node and said.epoch < self.clock
        if is_behind or (own is not None and own.rank > said.rank):
            self._report([node], now)

    def _is_preferred(self, said: Mastership) -> bool:
        own = self._mastership()
        return own is None or said.rank > own.rank

    def _follow(self, said: Mastership, lived_at: float, now: float) -> None:
        """Take a sign of life. A lower epoch than before is refused: its master hears our clock.

        So is a master that lacks acknowledged rows of this node, which leads then.
        """
        if self._may_lead and self.copy is not None and said.majority < self.copy[0]:
            return
        old = self.accepted if said.is_of(self.accepted) else None
        if said.epoch < self.epoch or (old and (said.epoch, said.beat) <= (old.epoch, old.beat)):
            return
        if self.state is not State.FOLLOWER:
            self._move(State.FOLLOWER)
        self._heard_at = max(lived_at, self._heard_at) if old else lived_at
        self.accepted, self.epoch = said, said.epoch
        self._plan(self._heard_at + SILENCE_SECONDS, self._time_out)
        if old is None:
            self._report(self._audience(), now)
            self._tell_owner("new_master", said)

    def _mastership(self) -> Mastership | None:
        if self.state is not State.MASTER:
            return self.accepted
        start = self._candidate().start
        majority = self._candidate().copy[0]
        return Mastership(self._own, self.session, self.epoch, start, self._beat_number, majority)

    def _candidate(self) -> Candidate:
        return Candidate(start=self._began_at + self._offset, copy=self.copy or NO_ROWS)

    def _audience(self) -> list[str]:
        nodes = sorted(self._peers)
        return nodes if len(nodes) <= AUDIENCE_LIMIT else self._chance.sample(nodes, AUDIENCE_LIMIT)

    def _ask(self, nodes: Iterable[str], now: float, candidate: Candidate | None = None) -> None:
        self._nonce += 1
        recent = {nonce: at for nonce, at in self._questions.items() if now < at + SILENCE_SECONDS}
        self._questions = recent | {self._nonce: now}
        ask = Ask(head=self._head(now), nonce=self._nonce, candidate=candidate)
        self._messages += [(node, ask) for node in nodes]

    def _report(self, nodes: Iterable[str], now: float, nonce: int = 0) -> None:
        head, said = self._head(now), self._mastership()
        age = now - self._heard_at if self.state is State.FOLLOWER else 0.0
        own = self._candidate() if self._may_lead and self.copy else None
        report = Report(head=head, nonce=nonce, mastership=said, age_seconds=age, candidate=own)
        self._messages += [(node, report) for node in nodes]

    def _head(self, now: float) -> Head:
        return Head(self.session, self.clock, now + self._offset, self._is_new)

    def _tell_owner(self, kind: EventKind, said: Mastership | None = None) -> None:
        node, epoch = (self._own, self.epoch) if said is None else (said.node, said.epoch)
        self._events.append(Event(kind, node, epoch))

    def _move(self, target: State) -> None:
        self.state = move(_MOVES, self.state, target)
