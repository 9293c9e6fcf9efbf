"""Lets the ranks of one group on one host wait for each other.

Each rank counts its progress in words of its own arena, which the others read. A word holds
(generation, count), the count in the low 40 bits. Arenas are reused by later groups, counts are
not:

- a word of an older generation counts as 0: that rank has not joined this group yet;
- a word of a newer generation means that the rank has left this group: `ChannelClosed`.

A rank that joins a generation stamps all of its words before it writes anything else. A reader
that finds the old stamp *after* it read a ring or a slot has therefore read data of that stamp;
`confirm` is that second look. Ranks of an old generation that are still running and ranks of the
new one can never take each other's data for their own.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from muster.collectives.backend import OnWait
from muster.collectives.deadline import Deadline
from muster.collectives.errors import ChannelClosed, PeerRefused
from muster.collectives.transports.arena import CLOSED, LINE_WORDS, Arena

COUNT_MASK: Final = (1 << 40) - 1
_GENERATIONS: Final = 1 << 23

SPINS: Final = 50
"""Polls before the first sleep. Each yields the core, which the awaited rank may need."""

FIRST_PAUSE_SECONDS: Final = 50e-6
LONGEST_PAUSE_SECONDS: Final = 1e-3
"""Sleeps double up to the longest, which bounds how late a death is noticed."""


class Flags:
    """One rank's view of all words, in one generation."""

    def __init__(
        self,
        *,
        arenas: Sequence[Arena],
        rank: int,
        generation: int,
        on_wait: OnWait,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Join `generation`; `arenas` are in rank order, and only the one of `rank` is writable.

        `on_wait` is called between sleeps: what it raises ends the wait, which is how ranks learn
        of a death. Raises
        `PeerRefused` if arenas differ, and ValueError if there are too many, or for a generation
        that is not above all that this arena has seen.
        """
        self.rank = rank
        self.arenas = tuple(arenas)
        self.own = _checked(self.arenas, rank)
        self.on_wait = on_wait
        self._sleep = sleep
        self._words = [arena.words for arena in self.arenas]
        self._own_words = self.own.words
        self._peers = [(peer, words) for peer, words in enumerate(self._words) if peer != rank]
        self._stamp = generation * (COUNT_MASK + 1)
        self._last = self._stamp + COUNT_MASK
        self._join(generation)

    @property
    def world_size(self) -> int:
        return len(self.arenas)

    def raise_to(self, word: int, count: int) -> None:
        """Set this rank's `word` to `count`, taken modulo 2^40.

        Raises `ChannelClosed` if this process has joined another generation since.
        """
        if self._own_words[word] > self._last:
            raise ChannelClosed(self.rank)
        # A plain store of an aligned word. It has one writer, so no atomic addition is needed. A
        # rank that loads it sees all that was stored before it (`refuse_other_machines`).
        self._own_words[word] = self._stamp + (count & COUNT_MASK)

    def count(self, rank: int, word: int) -> int:
        """Return the count of `rank`; raises `ChannelClosed` if it has left the group."""
        count = self._words[rank][word] - self._stamp
        if count > COUNT_MASK:
            raise ChannelClosed(rank)
        return max(count, 0)

    def confirm(self, word: int) -> None:
        """Raise `ChannelClosed` unless everything read so far was written in this generation."""
        # As the reader of a seqlock: loads keep their order, so a word that has the old stamp now
        # had it during all reads before.
        for rank, words in self._peers:
            if words[word] > self._last:
                raise ChannelClosed(rank)

    def have_all(self, word: int, count: int) -> bool:
        """True if every other rank has raised `word` to `count`; does not wait."""
        least, last = self._stamp + count, self._last
        for _, words in self._peers:  # noqa: SIM110 - `all` would take as long as a sum of 4 KB
            if not least <= words[word] <= last:
                return False
        return True

    def wait_for_all(self, word: int, count: int, deadline: Deadline) -> None:
        """Return when every other rank has raised `word` to `count`."""
        least, last = self._stamp + count, self._last

        def behind() -> list[int]:
            # A rank in another generation counts as behind until `_wait_asleep` looks closer.
            return [rank for rank, words in self._peers if not least <= words[word] <= last]

        self.wait(behind, deadline)

    def wait(self, missing: Callable[[], Sequence[int]], deadline: Deadline) -> None:
        """Return when `missing` returns no rank.

        Raises `Timeout`; `ChannelClosed` when a missing rank has closed or any rank has left the
        group; and what `on_wait` raises.
        """
        for _ in range(SPINS):
            if not missing():
                return
            os.sched_yield()
        self._wait_asleep(missing, deadline)

    def is_closed(self, rank: int) -> bool:
        """True if `rank` has closed in this generation."""
        return self.count(rank, CLOSED) > 0

    def check_open(self) -> None:
        """Raise `ChannelClosed` if this rank itself has closed or has left the group."""
        if self._own_words[CLOSED] > self._stamp:  # also true for a later generation
            raise ChannelClosed(self.rank)

    def close(self) -> None:
        """Announce that this rank has finished; its earlier counts stay valid."""
        with suppress(ChannelClosed):  # joining another generation closed this one
            self.raise_to(CLOSED, 1)

    def _wait_asleep(self, missing: Callable[[], Sequence[int]], deadline: Deadline) -> None:
        pause = FIRST_PAUSE_SECONDS
        while awaited := missing():
            self.on_wait()
            closed = [rank for rank in range(self.world_size) if self.is_closed(rank)]
            gone = [rank for rank in closed if rank in awaited or rank == self.rank]
            # Its last counts are visible now and may complete the wait.
            if gone and missing():
                raise ChannelClosed(gone[0])
            deadline.check()
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _join(self, generation: int) -> None:
        words = self._own_words
        if not max(words) < self._stamp < _GENERATIONS * (COUNT_MASK + 1):
            raise ValueError(
                f"generation {generation} is not above all that this arena has seen and below "
                f"{_GENERATIONS}"
            )
        # Before anything else is stored: who reads what a new generation wrote finds its stamp.
        for word in range(0, len(words), LINE_WORDS):
            words[word] = self._stamp


def _checked(arenas: Sequence[Arena], rank: int) -> Arena:
    """Return the arena of `rank` if all arenas have the same geometry."""
    own = arenas[rank]
    for peer, arena in enumerate(arenas):
        if arena.geometry != own.geometry:
            raise PeerRefused(
                f"rank {peer} made its arena for {arena.geometry}, this rank for {own.geometry}: "
                "they run different programs; start all with the same one"
            )
    if len(arenas) > own.geometry.max_ranks:
        raise ValueError(f"an arena is for up to {own.geometry.max_ranks} ranks, not {len(arenas)}")
    return own
