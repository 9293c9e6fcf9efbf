"""Which of the scripts that wait become one group. No I/O and no clock.

    GATHERING   waits for names, and for proposals
    PROPOSING   has asked the others of its round
    AGREED      has promised itself to one proposer
    CLOSED      is a member of a group

The script with the lowest id proposes a round once no name has come for a second, and closes it
when all of its members have agreed. It gives the round up when it knows a lower id, as all scripts
pass on who waits. A promise holds until its proposer releases it or is gone, so two rounds never
close with one member. Members pass on that a round is closed: its proposer may have died after it
had said so to one of them. A group that lives is the only one of its name: its members say so to
each script that comes later, and it waits until each of these has gone or waits anew.

Two-phase agreement as in https://en.wikipedia.org/wiki/Two-phase_commit_protocol, with the settling
time in place of a known set of participants.
"""

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from itertools import chain
from typing import Final, TypeAlias

import msgspec

from muster.contracts.errors import move

SETTLE_SECONDS: Final = 1.0
"""Without a new name before a round is proposed. In 4,000 simulated histories (`stress/mesh.py`) 22
groups became two with 0 s, and none with 0.5 s or 1 s."""

REACH_SECONDS: Final = 3.0
"""After which a name that others have said, and that has not been met, is forgotten."""


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """What two scripts that wait say to each other."""


class Propose(_Message, frozen=True, kw_only=True, tag="propose"):
    number: int
    """Of the round, counted by its proposer."""


class Agree(_Message, frozen=True, kw_only=True, tag="agree"):
    number: int


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """The round is given up."""


class Closed(_Message, frozen=True, kw_only=True, tag="closed"):
    """The members are a group; `token` is its secret."""

    members: tuple[str, ...]
    """By rank."""
    token: bytes


class Full(_Message, frozen=True, kw_only=True, tag="full"):
    """The sender is in a group of this name: until it is gone, or waits anew."""

    members: tuple[str, ...]


class Waits(_Message, frozen=True, kw_only=True, tag="waits"):
    """Another script waits, too: the receiver may not have found it yet."""

    name: str


FormingMessage: TypeAlias = Propose | Agree | Release | Closed | Full | Waits


class State(StrEnum):
    GATHERING = "gathering"
    PROPOSING = "proposing"
    AGREED = "agreed"
    CLOSED = "closed"


_MOVES: Final[Mapping[State, frozenset[State]]] = {
    State.GATHERING: frozenset({State.PROPOSING, State.AGREED, State.CLOSED}),
    State.PROPOSING: frozenset({State.GATHERING, State.CLOSED}),
    State.AGREED: frozenset({State.GATHERING, State.CLOSED}),
    State.CLOSED: frozenset(),
}


class Forming:
    """One script that waits for a group."""

    def __init__(
        self,
        own: str,
        size: int | None,
        make_token: Callable[[], bytes],
        now: float,
        *,
        awaited: Collection[str] = (),
        order: Callable[[Collection[str]], tuple[str, ...]] = lambda names: tuple(sorted(names)),
    ) -> None:
        """`size` counts this script, and `order` gives the ranks of a group.

        None takes all that wait, at least two, once each of `awaited`, members of an earlier
        group, has called or is gone.
        """
        self.state = State.GATHERING
        self.closed: Closed | None = None
        self.due: list[tuple[str, FormingMessage]] = []
        """What is to be sent, to whom; the owner empties it."""
        self._own = own
        self.size = size
        self._make_token = make_token
        self._order = order
        self._awaited = set(awaited)
        self._leading: set[str] = {own} if size is None else set()
        """Scripts of an earlier group, which know no size: they go before all others."""
        self.waiting: set[str] = set()
        """Who is linked, and waits for the same."""
        self._known: dict[str, float] = {}  # by name only, and until when they may be met
        self._living: dict[str, tuple[str, ...]] = {}  # groups, by the member that has said so
        self._named_at = now
        self._number = 0
        self._round: set[str] = set()  # of PROPOSING: the other members
        self._agreed: set[str] = set()
        self._proposer = ""  # of AGREED
        self._asked: dict[str, int] = {}  # proposals that wait for a promise, by proposer

    @property
    def full(self) -> tuple[str, ...]:
        """The members of a group of this name that lives, and is not ours."""
        return tuple(sorted({*chain(*self._living.values())}))

    # What happens

    def meet(self, peer: str, now: float, *, is_after: bool = False) -> None:
        """A linked script waits for the same group; `is_after` if it was in an earlier one."""
        if is_after:
            self._leading.add(peer)
        self._awaited.discard(peer)
        self._living.pop(peer, None)
        self.mention(peer, now)
        self._known.pop(peer, None)
        for other in sorted(self.waiting - {peer}):
            self._send(other, Waits(name=peer))
            self._send(peer, Waits(name=other))
        self.waiting.add(peer)
        if self.closed is not None:
            self._send(peer, Full(members=self.closed.members))

    def mention(self, peer: str, now: float) -> None:
        """Count a name; the settling time begins anew with each."""
        if peer not in {self._own, *self.waiting, *self._known}:
            self._known[peer] = now + REACH_SECONDS
            self._named_at = now

    def lose(self, peer: str, now: float, *, is_renewed: bool = False) -> None:
        """A script is gone or waits no more; or it has another link, and words may be lost."""
        self.waiting.discard(peer)
        self._leading.discard(peer)
        if not is_renewed:
            self._awaited.discard(peer)
        self._known.pop(peer, None)
        self._living.pop(peer, None)
        self._free(peer)
        if self.state is State.PROPOSING and peer in self._round:
            self._release(now)

    def receive(self, peer: str, message: FormingMessage, now: float) -> None:
        """Take a message of a linked script."""
        match message:
            case Propose(number=number):
                self._asked[peer] = number
            case Agree(number=number):
                self._count(peer, number)
            case Release():
                self._free(peer)
            case Closed():
                self._close(message)
            case Full(members=members):
                self._living[peer] = members
                self._free(peer)
            case Waits(name=other):
                self.mention(other, now)

    def check(self, now: float) -> None:
        """Give up the own round, agree to another one, or propose one, if it is time.

        Call it at `wake_at`, and after anything has happened.
        """
        self._known = {name: until for name, until in self._known.items() if until > now}
        if self.state is State.PROPOSING and not self._is_turn():
            self._release(now)
        is_free = self.state is State.GATHERING and not self._living
        if is_free and self._asked and self._first() in self._asked:
            self._proposer = self._first()
            self._move(State.AGREED)
            self._send(self._proposer, Agree(number=self._asked.pop(self._proposer)))
        if self._propose_at() > now:
            return
        self._number += 1
        self._agreed = set()
        self._round = set(sorted(self.waiting)[: self._others()])
        self._move(State.PROPOSING)
        for member in sorted(self._round):
            self._send(member, Propose(number=self._number))

    def wake_at(self) -> float:
        """When `check` is to be called; infinity if something has to happen before."""
        return min([self._propose_at(), *self._known.values()])

    # What follows

    def _propose_at(self) -> float:
        is_enough = len(self.waiting) >= max(self._others(), 1) and not self._awaited
        if self.state is State.GATHERING and is_enough and self._is_turn():
            return self._named_at + SETTLE_SECONDS
        return float("inf")

    def _is_turn(self) -> bool:
        return not self._living and self._first() == self._own

    def _others(self) -> int:
        return len(self.waiting) if self.size is None else self.size - 1

    def _turn(self, script: str) -> tuple[bool, str]:
        return script not in self._leading, script

    def _first(self) -> str:
        return min({self._own, *self.waiting, *self._known}, key=self._turn)

    def _free(self, peer: str) -> None:
        """The round of a proposer is over."""
        self._asked.pop(peer, None)
        if self.state is State.AGREED and peer == self._proposer:
            # It may have closed the round. A member that knows says so, or waits anew: the group
            # has lost one before it was connected.
            self._move(State.GATHERING)

    def _count(self, peer: str, number: int) -> None:
        if self.state is not State.PROPOSING or number != self._number:
            return
        self._agreed.add(peer)
        if self._agreed >= self._round:
            members = self._order({self._own, *self._round})
            self._close(Closed(members=members, token=self._make_token()))

    def _close(self, closed: Closed) -> None:
        """Become a member, and pass it on; to all others the group is full."""
        if self.state is State.CLOSED:
            return
        self._move(State.CLOSED)
        self.closed = closed
        for peer in sorted(self.waiting):
            is_member = peer in closed.members
            self._send(peer, closed if is_member else Full(members=closed.members))

    def _release(self, now: float) -> None:
        """Give up the own round."""
        for member in sorted(self._round):
            self._send(member, Release())
        self._named_at = now
        self._move(State.GATHERING)

    def _send(self, peer: str, message: FormingMessage) -> None:
        self.due.append((peer, message))

    def _move(self, target: State) -> None:
        self.state = move(_MOVES, self.state, target)
