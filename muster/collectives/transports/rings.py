"""A stream of bytes through two ring buffers in shared memory, one for each direction.

Each ring has one writer and one reader. The writer's byte count is in the writer's arena and the
reader's in the reader's; both count modulo 2^40, and only their difference matters. A count is
raised after the bytes are copied, which x86 keeps in order (`refuse_other_machines`).
"""

import io
import select
from collections.abc import Iterable
from typing import Final

from muster.collectives.backend import ELEMENT_BYTES, Target, fill
from muster.collectives.transports.flags import COUNT_MASK, Flags
from muster.collectives.transports.streams import Stream

PIECE_BYTES: Final = 256 << 10
"""Published at once, so that the reader copies while the next piece is written."""


class RingStream(Stream):
    """The stream to one peer of the same host."""

    alignment = ELEMENT_BYTES

    def __init__(self, flags: Flags, peer: int, watch: io.FileIO | None = None) -> None:
        """`watch` is readable once the peer is dead; it is owned."""
        geometry = flags.own.geometry
        self.peer = peer
        self._flags = flags
        self._watch = watch
        self._poll = select.poll()
        if watch is not None:
            self._poll.register(watch, select.POLLIN)
        self._outbox = flags.own.ring(peer)
        self._inbox = flags.arenas[peer].ring(flags.rank)
        self._size = len(self._outbox)
        # In our arena: what we wrote for the peer, and what we took from it.
        self._sent_word = geometry.sent_word(peer)
        self._taken_word = geometry.taken_word(peer)
        # In the peer's arena: what it wrote for us, and what it took from us.
        self._peers_sent_word = geometry.sent_word(flags.rank)
        self._peers_taken_word = geometry.taken_word(flags.rank)
        self._sent = self._taken = 0

    def send(self, parts: Iterable[memoryview]) -> int:
        # The reader raises it after its copy, so what it counts may be overwritten.
        taken = self._flags.count(self.peer, self._peers_taken_word)
        # Exact although counts wrap, as their difference never exceeds the ring.
        room = self._size - ((self._sent - taken) & COUNT_MASK)
        sent = 0
        for part in parts:
            size = min(part.nbytes, room - sent, PIECE_BYTES - sent)
            at = (self._sent + sent) % self._size
            if at + size <= self._size:
                self._outbox[at : at + size] = part[:size]
            else:
                first = self._size - at
                self._outbox[at:] = part[:first]
                self._outbox[: size - first] = part[first:size]
            sent += size
            if size < part.nbytes:
                break
        if sent:
            # After the bytes: x86 keeps the order of stores, so who sees the count sees them.
            self._sent += sent
            self._flags.raise_to(self._sent_word, self._sent)
        return sent

    def receive(self, target: Target, offset: int, size_bytes: int) -> int:
        # The count is loaded before the bytes that it covers: x86 keeps the order of loads.
        size = min(size_bytes, self._waiting(), PIECE_BYTES)
        if size < size_bytes:
            size -= size % ELEMENT_BYTES  # the rings' size is a multiple, so no element is cut
        if size == 0:
            return 0
        at = self._taken % self._size
        first = min(size, self._size - at)
        # An accumulator adds straight from the peer's memory, which saves a copy of every message.
        fill(target, offset, self._inbox[at : at + first])
        if first < size:
            fill(target, offset + first, self._inbox[: size - first])
        # Raises if the writer has joined another generation and may have overwritten the ring.
        self._flags.count(self.peer, self._peers_sent_word)
        # Only now: this lets the writer overwrite what was read.
        self._taken += size
        self._flags.raise_to(self._taken_word, self._taken)
        return size

    def has_left(self) -> bool:
        # In this order: what it sent before it closed is visible once the closing is.
        return self._flags.is_closed(self.peer) and self._waiting() == 0

    def has_hung_up(self) -> bool:
        return self._watch is not None and bool(self._poll.poll(0))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _waiting(self) -> int:
        return (self._flags.count(self.peer, self._peers_sent_word) - self._taken) & COUNT_MASK
