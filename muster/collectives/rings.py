"""Messages of any size through a ring of shared memory with one writer and one reader.

A message is its size, its bytes and a verdict, each put into the ring as room comes free. The
verdict makes a message that was given up in the middle harmless: its sender fills it up with
whatever lies there and calls it void, and the reader drops it. How far the writer has come stands
in the writer's arena, how far the reader has in the reader's; both count bytes for ever, modulo
2^40, and only their difference matters.
"""

import struct
from typing import Final

from muster.collectives.errors import SizeMismatch
from muster.collectives.flags import COUNT_MASK, Deadline, Flags

PIECE_BYTES: Final = 256 << 10
"""Said to the other side at once, so that it copies while the next piece comes."""

_WORD: Final = struct.Struct("<Q")
_WHOLE: Final = _WORD.pack(1)
_VOID: Final = _WORD.pack(0)


class Outgoing:
    """What this rank sends to one other."""

    def __init__(self, flags: Flags, peer: int) -> None:
        self._flags = flags
        self._peer = peer
        self._ring = flags.own.ring(peer)
        self._sent_word = flags.own.geometry.sent_word(peer)
        self._taken_word = flags.own.geometry.taken_word(flags.rank)
        self._sent = 0
        self._owed = 0
        """Bytes still to come of a message that was begun, its verdict among them."""

    def send(self, data: memoryview, deadline: Deadline) -> None:
        """Return when `data` is in the ring; interrupted before that, it will not arrive."""
        self._void_the_rest(deadline)
        # A message that fits is put in at once or not at all.
        self._await_room(min(data.nbytes + 2 * _WORD.size, len(self._ring)), deadline)
        self._put(memoryview(_WORD.pack(data.nbytes)))
        self._owed = data.nbytes + _WORD.size
        while data:
            piece = data[: min(self._await_room(1, deadline), PIECE_BYTES)]
            self._put(piece)
            self._owed -= len(piece)
            self._say()
            data = data[len(piece) :]
        self._finish(_WHOLE, deadline)

    def _void_the_rest(self, deadline: Deadline) -> None:
        while self._owed > _WORD.size:
            step = min(self._await_room(1, deadline), self._owed - _WORD.size)
            self._sent += step
            self._owed -= step
            self._say()
        if self._owed:
            self._finish(_VOID, deadline)

    def _finish(self, verdict: bytes, deadline: Deadline) -> None:
        self._await_room(_WORD.size, deadline)
        self._put(memoryview(verdict))
        self._owed = 0
        self._say()

    def _await_room(self, least: int, deadline: Deadline) -> int:
        self._flags.wait(lambda: () if self._room() >= least else (self._peer,), deadline)
        return self._room()

    def _room(self) -> int:
        taken = self._flags.count(self._peer, self._taken_word)
        return len(self._ring) - ((self._sent - taken) & COUNT_MASK)

    def _put(self, data: memoryview) -> None:
        at = self._sent % len(self._ring)
        first = min(len(data), len(self._ring) - at)
        self._ring[at : at + first] = data[:first]
        self._ring[: len(data) - first] = data[first:]
        self._sent += len(data)

    def _say(self) -> None:
        self._flags.raise_to(self._sent_word, self._sent)


class Incoming:
    """What one other rank sends to this one."""

    def __init__(self, flags: Flags, peer: int) -> None:
        self._flags = flags
        self._peer = peer
        self._ring = flags.arenas[peer].ring(flags.rank)
        self._sent_word = flags.own.geometry.sent_word(flags.rank)
        self._taken_word = flags.own.geometry.taken_word(peer)
        self._taken = 0
        self._size: int | None = None
        """Of the message at hand; None between messages."""
        self._kept = b""
        """What an interrupted call has already taken of it."""

    def receive_into(self, target: memoryview, deadline: Deadline) -> None:
        """Fill `target`; what an interrupted call has taken is kept for the next one."""
        is_whole = False
        while not is_whole:
            if self._size is None:
                (self._size,) = _WORD.unpack(self._take_word(deadline))
            if self._size != len(target):
                raise SizeMismatch(len(target), self._size)
            self._fill(target, deadline)
            is_whole = self._take_word(deadline) == _WHOLE
            self._size, self._kept = None, b""

    def _fill(self, target: memoryview, deadline: Deadline) -> None:
        at = len(self._kept)
        target[:at] = self._kept
        try:
            while at < len(target):
                step = min(self._await_bytes(1, deadline), len(target) - at)
                self._take(target[at : at + step])
                at += step
            self._await_bytes(_WORD.size, deadline)
        except BaseException:
            self._kept = bytes(target[:at])
            raise

    def _take_word(self, deadline: Deadline) -> bytes:
        self._await_bytes(_WORD.size, deadline)
        word = bytearray(_WORD.size)
        self._take(memoryview(word))
        return bytes(word)

    def _await_bytes(self, least: int, deadline: Deadline) -> int:
        self._flags.wait(lambda: () if self._waiting() >= least else (self._peer,), deadline)
        return self._waiting()

    def _waiting(self) -> int:
        return (self._flags.count(self._peer, self._sent_word) - self._taken) & COUNT_MASK

    def _take(self, target: memoryview) -> None:
        at = self._taken % len(self._ring)
        first = min(len(target), len(self._ring) - at)
        target[:first] = self._ring[at : at + first]
        target[first:] = self._ring[: len(target) - first]
        # A writer that has gone on to another generation may have written over it meanwhile.
        self._flags.count(self._peer, self._sent_word)
        self._taken += len(target)
        self._flags.raise_to(self._taken_word, self._taken)
