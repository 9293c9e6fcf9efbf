"""Which of the scripts that wait become one group. No I/O and no clock.

    GATHERING   waits for names, and for proposals
    PROPOSING   has asked the others of its round
    AGREED      has promised itself to one proposer
    CLOSED      is a member of a group

The script with the lowest id proposes a round once no name has come for a second, and closes it
when all of its members have agreed. A promise holds until its proposer releases it or is gone, so
two rounds never close with one member. Members pass on that a round is closed: its proposer may
have died after it had said so to one of them. A group that lives is the only one of its name:
a script that comes later gets its members' names, and waits.

Two-phase agreement as in https://en.wikipedia.org/wiki/Two-phase_commit_protocol, with the settling
time in place of a known set of participants.
"""

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from muster.contracts.errors import move

SETTLE_SECONDS: Final = 1.0
"""Without a new name before a round is proposed. In simulations 51 of 4,000 groups became two with
0 s, 2 with 0.5 s, and none or one with 1 s."""

REACH_SECONDS: Final = 3.0
"""After which a name that others have said, and that has not been met, is forgotten."""


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """What two scripts that wait say to each other."""


class Propose(_Message, frozen=True, kw_only=True, tag="propose"):
    number: int
    """Of the round, counted by its proposer."""


class Agree(_Message, frozen=True, kw_only=True, tag="agree"):
    number: int


class Defer(_Message, frozen=True, kw_only=True, tag="defer"):
    """No promise, or the wish to be released: a script that goes before the proposer is known."""

    to: str


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """The round is given up."""

    number: int


class Closed(_Message, frozen=True, kw_only=True, tag="closed"):
    """The members are a group; `token` is its secret."""

    members: tuple[str, ...]
    token: bytes


class Full(_Message, frozen=True, kw_only=True, tag="full"):
    """A group of this name lives. It ends with the last of its members."""

    members: tuple[str, ...]


class Waits(_Message, frozen=True, kw_only=True, tag="waits"):
    """Another script waits, too: the receiver may not have found it yet."""

    name: str


FormingMessage: TypeAlias = Propose | Agree | Defer | Release | Closed | Full | Waits


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
    ) -> None:
        """`size` counts this script.

        None takes all that wait, at least two, once each of `awaited`, members of an earlier
        group, has called or is gone.
        """
        self.state = State.GATHERING
        self.closed: Closed | None = None
        self.full: tuple[str, ...] = ()
        """The members of a group of this name that lives, and is not ours."""
        self.due: list[tuple[str, FormingMessage]] = []
        """What is to be sent, to whom; the owner empties it."""
        self._own = own
        self.size = size
        self._make_token = make_token
        self._awaited = set(awaited)
        self._leading: set[str] = {own} if size is None else set()
        """Scripts of an earlier group, which know no size: they go before all others."""
        self.waiting: set[str] = set()
        """Who is linked, and waits for the same."""
        self._known: dict[str, float] = {}  # by name only, and until when they may be met
        self._gone: set[str] = set()
        self._named_at = now
        self._number = 0
        self._round: set[str] = set()  # of PROPOSING: the other members
        self._agreed: set[str] = set()
        self._proposer = ""  # of AGREED
        self._asked: dict[str, int] = {}  # proposals that wait for a promise, by proposer

    # What happens

    def meet(self, peer: str, now: float, *, is_after: bool = False) -> None:
        """A linked script waits for the same group; `is_after` if it was in an earlier one."""
        if is_after:
            self._leading.add(peer)
        if peer in self.full:
            self.full = ()  # it waits anew; if that group lives all the same, it says so again
        self._awaited.discard(peer)
        self._gone.discard(peer)
        self._name(peer, now)
        self._known.pop(peer, None)
        for other in sorted(self.waiting - {peer}):
            self._send(other, Waits(name=peer))
            self._send(peer, Waits(name=other))
        self.waiting.add(peer)
        if members := self._members_of_living():
            self._send(peer, Full(members=members))

    def mention(self, peer: str, now: float) -> None:
        """Another script has said that this one waits, too."""
        if peer not in self.waiting | self._gone and peer != self._own:
            self._name(peer, now)

    def lose(self, peer: str, now: float) -> None:
        """A script is gone, waits no more, or could not be reached."""
        is_in_round = peer in self._round
        for names in (self.waiting, self._awaited, self._round, self._leading):
            names.discard(peer)
        self._known.pop(peer, None)
        self._gone.add(peer)
        self._asked.pop(peer, None)
        self.full = tuple(member for member in self.full if member != peer)
        if self.state is State.PROPOSING and is_in_round:
            self._release(now)
        elif self.state is State.AGREED and peer == self._proposer:
            # Another member may know that the round was closed: this time is for its word.
            self._named_at = now
            self._move(State.GATHERING)

    def receive(self, peer: str, message: FormingMessage, now: float) -> None:
        """Take a message of a linked script."""
        match message:
            case Propose(number=number):
                self._asked[peer] = number
                self._answer(now)
            case Agree(number=number):
                self._count(peer, number)
            case Defer(to=other):
                if self.state is State.PROPOSING:
                    self._release(now)
                self.mention(other, now)
            case Release(number=number):
                self._free(peer, number, now)
            case Closed():
                self._close(message)
            case Full(members=members):
                self._refuse(peer, members, now)
            case Waits(name=other):
                self.mention(other, now)

    def check(self, now: float) -> None:
        """Forget names, and propose a round, if it is time.

        Call it at `wake_at`, and after anything has happened.
        """
        for name in [name for name, until in self._known.items() if until <= now]:
            self.lose(name, now)
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
        is_turn = self.state is State.GATHERING and self._first() == self._own
        is_enough = len(self.waiting) >= max(self._others(), 1) and not self._awaited
        if not (is_turn and is_enough) or self.full:
            return float("inf")
        return self._named_at + SETTLE_SECONDS

    def _others(self) -> int:
        return len(self.waiting) if self.size is None else self.size - 1

    def _order(self, script: str) -> tuple[bool, str]:
        return script not in self._leading, script

    def _first(self) -> str:
        return min({self._own, *self.waiting, *self._known}, key=self._order)

    def _members_of_living(self) -> tuple[str, ...]:
        return self.full if self.closed is None else self.closed.members

    def _name(self, peer: str, now: float) -> None:
        """Count a name; the settling time begins anew with each, and with a name that is lost."""
        if peer not in self.waiting and peer not in self._known:
            self._known[peer] = now + REACH_SECONDS
            self._named_at = now
            if self.state is State.PROPOSING and self._order(peer) < self._order(self._own):
                self._release(now)

    def _answer(self, now: float) -> None:
        """Promise this script to the proposer that goes before all, if it is free."""
        if not self._asked:
            return
        proposer, first = min(self._asked, key=self._order), self._first()
        if proposer in self.full:
            self.full = ()  # its members form a group anew
        if members := self._members_of_living():
            for other in self._asked:
                self._send(other, Full(members=members))
            self._asked.clear()
            return
        if self.state is State.PROPOSING and self._order(proposer) < self._order(self._own):
            self._release(now)
        if self.state is State.GATHERING and proposer == first:
            self._proposer = proposer
            self._move(State.AGREED)
            self._send(proposer, Agree(number=self._asked.pop(proposer)))
        elif self.state is State.AGREED and self._order(proposer) < self._order(self._proposer):
            self._send(self._proposer, Defer(to=proposer))
        for other in self._asked:
            if self._order(other) > self._order(first):
                self._send(other, Defer(to=first))

    def _free(self, peer: str, number: int, now: float) -> None:
        if self._asked.get(peer) == number:
            del self._asked[peer]
        if self.state is State.AGREED and peer == self._proposer:
            self._move(State.GATHERING)
            self._answer(now)

    def _count(self, peer: str, number: int) -> None:
        if self.state is not State.PROPOSING or number != self._number:
            return
        self._agreed.add(peer)
        if self._agreed >= self._round:
            members = tuple(sorted({self._own, *self._round}))
            self._close(Closed(members=members, token=self._make_token()))

    def _close(self, closed: Closed) -> None:
        """Become a member, and pass it on; to all others the group is full."""
        if self.state is State.CLOSED or self._own not in closed.members:
            return
        if self.state is State.PROPOSING:
            self._abandon(set(closed.members))
        self._move(State.CLOSED)
        self.closed = closed
        for peer in sorted(self.waiting):
            is_member = peer in closed.members
            self._send(peer, closed if is_member else Full(members=closed.members))

    def _refuse(self, said_by: str, members: tuple[str, ...], now: float) -> None:
        if self.size is None and said_by not in members:
            return  # others may still speak of the earlier group
        new = {*members} - {*self.full} - self._gone
        if self.state is State.CLOSED or self._own in members or not new:
            return
        self.full = tuple(sorted({*self.full} | new))
        for member in members:
            self.mention(member, now)
        if self.state is State.PROPOSING:
            self._release(now)
        for peer in sorted(self.waiting - {*self.full}):
            self._send(peer, Full(members=self.full))

    def _release(self, now: float) -> None:
        """Give up the own round."""
        self._abandon(set())
        self._named_at = now
        self._move(State.GATHERING)

    def _abandon(self, kept: set[str]) -> None:
        for member in sorted(self._round - kept):
            self._send(member, Release(number=self._number))

    def _send(self, peer: str, message: FormingMessage) -> None:
        self.due.append((peer, message))

    def _move(self, target: State) -> None:
        self.state = move(_MOVES, self.state, target)
