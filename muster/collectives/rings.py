"""Messages of any size through a ring buffer in shared memory with one writer and one reader.

A message is its size and its bytes, written as space becomes free. The writer's byte count is in
the writer's arena and the reader's in the reader's; both count modulo 2^40, and only their
difference matters.

An interrupted transfer keeps the stream whole: a reader puts back what it took, and a writer copies
the rest of a message that was partly written, which is sent before the next one.
"""

import struct
from typing import Final

from muster.collectives.errors import SizeMismatch
from muster.collectives.flags import COUNT_MASK, Flags

PIECE_BYTES: Final = 256 << 10
"""Published at once, so that the reader copies while the next piece is written."""

_SIZE: Final = struct.Struct("<Q")


class Outbox:
    """The ring to which this rank writes for one peer."""

    def __init__(self, flags: Flags, peer: int) -> None:
        self._flags = flags
        self._peer = peer
        self._ring = flags.own.ring(peer)
        self._sent_word = flags.own.geometry.sent_word(peer)
        self._taken_word = flags.own.geometry.taken_word(flags.rank)
        self._sent = 0
        self.leftover = b""
        """The rest of a message that was interrupted."""

    @property
    def capacity(self) -> int:
        return len(self._ring)

    @property
    def room(self) -> int:
        taken = self._flags.count(self._peer, self._taken_word)
        return len(self._ring) - ((self._sent - taken) & COUNT_MASK)

    def put(self, data: memoryview) -> int:
        """Write as much of `data` as fits; return the number of bytes."""
        size = min(len(data), self.room)
        at = self._sent % len(self._ring)
        first = min(size, len(self._ring) - at)
        self._ring[at : at + first] = data[:first]
        self._ring[: size - first] = data[first:size]
        self._sent += size
        self._flags.raise_to(self._sent_word, self._sent)
        return size


class Inbox:
    """The ring to which one peer writes for this rank."""

    def __init__(self, flags: Flags, peer: int) -> None:
        self._flags = flags
        self._peer = peer
        self._ring = flags.arenas[peer].ring(flags.rank)
        self._sent_word = flags.own.geometry.sent_word(flags.rank)
        self._taken_word = flags.own.geometry.taken_word(peer)
        self._taken = 0
        self._spilled = bytearray()
        """Bytes that precede those in the ring."""

    @property
    def waiting(self) -> int:
        """The number of bytes that can be read."""
        return len(self._spilled) + self._in_ring

    @property
    def _in_ring(self) -> int:
        return (self._flags.count(self._peer, self._sent_word) - self._taken) & COUNT_MASK

    def take(self, target: memoryview) -> int:
        """Fill `target` as far as there are bytes; return the number of bytes."""
        spilled = min(len(target), len(self._spilled))
        if spilled:
            target[:spilled] = self._spilled[:spilled]
            del self._spilled[:spilled]
        return spilled + self._take_from_ring(target[spilled:])

    def put_back(self, data: memoryview) -> None:
        self._spilled[:0] = data

    def spill(self) -> None:
        """Free the ring; two ranks that send to each other would otherwise deadlock."""
        spilled = bytearray(self._in_ring)
        self._take_from_ring(memoryview(spilled))
        self._spilled += spilled

    def _take_from_ring(self, target: memoryview) -> int:
        size = min(len(target), self._in_ring)
        at = self._taken % len(self._ring)
        first = min(size, len(self._ring) - at)
        target[:first] = self._ring[at : at + first]
        target[first:size] = self._ring[: size - first]
        # Raises if the writer has joined another generation and may have overwritten the ring.
        self._flags.count(self._peer, self._sent_word)
        self._taken += size
        self._flags.raise_to(self._taken_word, self._taken)
        return size


class Sending:
    """A message that is being sent."""

    def __init__(self, box: Outbox, data: memoryview, peer: int) -> None:
        self.peer = peer
        self._box = box
        self._parts = [memoryview(_SIZE.pack(data.nbytes)), data]
        # A message that fits into the ring is written at once or not at all.
        self._least = min(_SIZE.size + data.nbytes, box.capacity)
        self._has_begun = False

    def can_move(self) -> bool:
        needed = 1 if self._has_begun or self._box.leftover else self._least
        return self._box.room >= needed

    def move(self) -> bool:
        """Write what fits into the ring; return True when the message is complete."""
        box = self._box
        if box.leftover:
            box.leftover = box.leftover[box.put(memoryview(box.leftover)) :]
            return False
        self._has_begun = True
        while self._parts and (size := box.put(self._parts[0][:PIECE_BYTES])):
            self._parts[0] = self._parts[0][size:]
            if not self._parts[0]:
                self._parts.pop(0)
        return not any(self._parts)

    def interrupt(self) -> None:
        if self._has_begun:
            self._box.leftover = b"".join(self._parts)


class Receiving:
    """A message that is being received."""

    def __init__(self, box: Inbox, target: memoryview, peer: int) -> None:
        self.peer = peer
        self._box = box
        self._target = target
        self._size = bytearray()
        self._filled = 0

    def can_move(self) -> bool:
        return self._box.waiting >= (1 if self._size else _SIZE.size)

    def move(self) -> bool:
        """Read what has arrived; return True when complete. Raises `SizeMismatch`."""
        if not self._size:
            self._open()
        while self._filled < len(self._target):
            end = self._filled + PIECE_BYTES
            if not (size := self._box.take(self._target[self._filled : end])):
                return False
            self._filled += size
        return True

    def interrupt(self) -> None:
        self._box.put_back(self._target[: self._filled])
        self._box.put_back(memoryview(self._size))

    def _open(self) -> None:
        self._size = bytearray(_SIZE.size)
        self._box.take(memoryview(self._size))
        (size,) = _SIZE.unpack(self._size)
        if size != len(self._target):
            raise SizeMismatch(len(self._target), size)
