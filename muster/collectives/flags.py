"""How the ranks of one group on one host wait for one another.

Each rank counts, in words of its own arena, what it has done; the others watch. A word holds
(generation, count), the count in the low 40 bits. Arenas outlive groups, counts do not:

- a word of an older generation counts as 0: that rank has not taken up this layout yet;
- a word of a newer one says that its rank has left this group: `ChannelClosed`.

A rank that takes up a generation first stamps all of its words and only then writes anything else.
So whoever has read its rings or slots and *afterwards* still finds the old stamp has read what was
written under it; `confirm` is that second look. A rank of an old generation that runs on can
therefore neither be believed by the new one nor believe what the new one writes.
"""

import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from muster.collectives.arena import CLOSED, LINE_WORDS, Arena
from muster.collectives.backend import Attention
from muster.collectives.deadline import Deadline
from muster.collectives.errors import (
    BackendUnavailable,
    ChannelClosed,
    InvalidRank,
    InvalidWorldSize,
    PeerRefused,
)

COUNT_MASK: Final = (1 << 40) - 1
_GENERATIONS: Final = 1 << 23

SPINS: Final = 50
"""Looks at a word before the first sleep. Each yields the core: the one waited for may need it."""

FIRST_PAUSE_SECONDS: Final = 50e-6
LONGEST_PAUSE_SECONDS: Final = 1e-3
"""Pauses double from the first to the longest, which bounds how late a death is noticed."""


class Flags:
    """One rank's view of the words of all, in one generation."""

    def __init__(
        self,
        *,
        arenas: Sequence[Arena],
        rank: int,
        generation: int,
        pidfds: Mapping[int, int],
        attention: Attention,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take up `generation`; `arenas` are in rank order, that of `rank` the writable one.

        `pidfds` (rank → descriptor, which stays the caller's) show who has died; who is not in it
        is taken to live. `attention` is called between sleeps: what it raises ends the wait.
        Raises `PeerRefused` if arenas differ, `BackendUnavailable` if there are too many, and
        ValueError for a generation that is not above all that this arena has seen.
        """
        self.rank = rank
        self.arenas = tuple(arenas)
        self.own = _checked(self.arenas, rank)
        self._pidfds = dict(pidfds)
        self._attention = attention
        self._sleep = sleep
        self._words = [arena.words for arena in self.arenas]
        self._own_words = self.own.words
        self._peers = [(peer, words) for peer, words in enumerate(self._words) if peer != rank]
        self._stamp = generation * (COUNT_MASK + 1)
        self._last = self._stamp + COUNT_MASK
        self._take_up(generation)

    @property
    def world_size(self) -> int:
        return len(self.arenas)

    def raise_to(self, word: int, count: int) -> None:
        """Say that one's own `word` has come to `count`, taken modulo 2^40.

        Raises `ChannelClosed` if this very process has taken up another generation since.
        """
        if self._own_words[word] > self._last:
            raise ChannelClosed(self.rank)
        self._own_words[word] = self._stamp + (count & COUNT_MASK)

    def count(self, rank: int, word: int) -> int:
        """Return what `rank` has come to; raises `ChannelClosed` if it has left the group."""
        count = self._words[rank][word] - self._stamp
        if count > COUNT_MASK:
            raise ChannelClosed(rank)
        return max(count, 0)

    def confirm(self, word: int) -> None:
        """Raise `ChannelClosed` unless all that was read so far was written in this generation."""
        for rank, words in self._peers:
            if words[word] > self._last:
                raise ChannelClosed(rank)

    def have_all(self, word: int, count: int) -> bool:
        """Whether every other rank has raised `word` to `count`: one look."""
        least, last = self._stamp + count, self._last
        for _, words in self._peers:  # noqa: SIM110 - `all` would take as long as a sum of 4 KB
            if not least <= words[word] <= last:
                return False
        return True

    def wait_for_all(self, word: int, count: int, deadline: Deadline) -> None:
        """Return when every other rank has raised `word` to `count`."""
        least, last = self._stamp + count, self._last

        def behind() -> list[int]:
            # One that is in another generation is behind, too, until `_gone` says what it is.
            return [rank for rank, words in self._peers if not least <= words[word] <= last]

        self.wait(behind, deadline)

    def wait(self, missing: Callable[[], Sequence[int]], deadline: Deadline) -> None:
        """Return when `missing` names no rank any more.

        Raises `TimedOut`; `ChannelClosed` when one of those missing has closed, or anybody has died
        without closing; and whatever `attention` raises.
        """
        for _ in range(SPINS):
            if not missing():
                return
            os.sched_yield()
        self._wait_asleep(missing, deadline)

    def is_closed(self, rank: int) -> bool:
        """Whether `rank` has closed, in this generation."""
        return self.count(rank, CLOSED) > 0

    def check_open(self) -> None:
        """Raise `ChannelClosed` if this rank itself has closed or has left the group."""
        if self._own_words[CLOSED] > self._stamp:  # and that of a later generation is above both
            raise ChannelClosed(self.rank)

    def close(self) -> None:
        """Say that this rank waits and answers no more. What it has said already still holds."""
        with suppress(ChannelClosed):  # who has gone on to another generation has left this one
            self.raise_to(CLOSED, 1)

    @property
    def _ranks(self) -> range:
        return range(len(self.arenas))

    def _wait_asleep(self, missing: Callable[[], Sequence[int]], deadline: Deadline) -> None:
        pause = FIRST_PAUSE_SECONDS
        while awaited := missing():
            self._attention()
            gone = next(self._gone(awaited), None)
            # What it did before it went is seen by now, and may be all that was waited for.
            if gone is not None and missing():
                raise ChannelClosed(gone)
            deadline.check()
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _gone(self, awaited: Sequence[int]) -> Iterator[int]:
        """Yield who will not answer: closed and waited for, or dead without having closed."""
        dead = self._dead()
        for rank in self._ranks:
            if rank in awaited or rank == self.rank if self.is_closed(rank) else rank in dead:
                yield rank

    def _dead(self) -> set[int]:
        """Return whose pidfd is readable."""
        poll = select.poll()  # one per call: it must not be shared between threads
        ranks = {descriptor: rank for rank, descriptor in self._pidfds.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        return {ranks[descriptor] for descriptor, _ in poll.poll(0)}

    def _take_up(self, generation: int) -> None:
        words = self._own_words
        if not max(words) < self._stamp < _GENERATIONS * (COUNT_MASK + 1):
            raise ValueError(
                f"generation {generation} is not above all that this arena has seen and below "
                f"{_GENERATIONS}"
            )
        for word in range(0, len(words), LINE_WORDS):
            words[word] = self._stamp


def _checked(arenas: Sequence[Arena], rank: int) -> Arena:
    """Return the arena of `rank`, if all fit together."""
    if not arenas:
        raise InvalidWorldSize(0, 1)
    if not 0 <= rank < len(arenas):
        raise InvalidRank(rank, len(arenas))
    own = arenas[rank]
    for peer, arena in enumerate(arenas):
        if arena.geometry != own.geometry:
            raise PeerRefused(
                f"rank {peer} made its arena for {arena.geometry}, this rank for {own.geometry}: "
                "they run different programs, so start all with the same one"
            )
    if len(arenas) > own.geometry.places:
        raise BackendUnavailable(
            f"an arena has places for {own.geometry.places} ranks, not for {len(arenas)}: take "
            "fewer ranks"
        )
    return own
