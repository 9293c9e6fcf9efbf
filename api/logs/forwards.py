"""Lines of one log file, forwards, as they become complete.

What lies next to each other is read, cut and put into words as one piece: a line by itself costs
more than all that is done to it. Only one that is too long to be shown is looked at alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from api.logs import lines
from api.logs.lines import LINE_LIMIT_BYTES, line_at, read, shown, size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Whole lines: the bytes [start, end) of their file, the last line end included.

    Or a piece of a line, without one.
    """

    start: int
    end: int
    raw: bytes
    """Without the last line end."""

    @property
    def text(self) -> str:
        """What people see, joined by line ends."""
        return shown(self.raw)

    @property
    def first_end(self) -> int:
        """Where its first line ends."""
        newline = self.raw.find(b"\n")
        return self.end if newline < 0 else self.start + newline + 1

    def parted(self, place: int) -> tuple[Self, Self | None]:
        """Return the lines that end at `place` or below, of which there is one, and the rest."""
        newline = self.raw.rfind(b"\n", 0, place - self.start)
        if place >= self.end or newline < 0:
            return self, None
        middle = self.start + newline + 1
        return (
            type(self)(start=self.start, end=middle, raw=self.raw[:newline]),
            type(self)(start=middle, end=self.end, raw=self.raw[newline + 1 :]),
        )


class Follower:
    """Hands out the lines of one file from `offset` on; none beyond `limit`."""

    def __init__(self, path: Path, offset: int, limit: float = math.inf) -> None:
        self._path = path
        self._limit = limit
        self.offset = offset
        """Where the first line that was not handed out begins."""
        self._searched = offset
        """No line end lies between `offset` and here: a growing line is searched only once."""

    def read(self) -> list[Stretch]:
        """Return the complete lines of a block, or one long line; nothing if there is none.

        Of a line that is longer than `PIECE_BYTES` it is the next piece, however long that line is.
        """
        size = size_of(self._path)
        if size < self.offset:
            # Shorter than what was handed out: it is another file, which begins anew.
            self.offset = self._searched = 0
        end = int(min(size, self._limit))
        found: list[Stretch] = []
        while self._searched < end and not found:
            # One byte more than a piece: a line end there is the end of this line.
            beyond = min(end, self.offset + lines.PIECE_BYTES + 1)
            count = min(lines.BLOCK_BYTES, beyond - self._searched)
            block = read(self._path, self._searched, count)
            if not block:
                break
            found += self._split(block)
            if not found and self._searched - self.offset > lines.PIECE_BYTES:
                found.append(self._next_piece())
        return found

    def rest(self) -> list[Stretch]:
        """Return the unfinished last line of a file to which nothing is added below the limit."""
        end = int(min(size_of(self._path), self._limit))
        if end <= self.offset:
            return []
        alone = self._alone(self.offset, end)
        self.offset = self._searched = end
        return [alone]

    def _next_piece(self) -> Stretch:
        start = self.offset
        self.offset += lines.PIECE_BYTES
        return self._alone(start, self.offset)

    def _split(self, block: bytes) -> Iterator[Stretch]:
        start = self._searched
        last = block.rfind(b"\n")
        if last < 0:
            self._searched += len(block)
            return
        first = 0
        if self.offset < start:  # the first line began in an earlier block
            first = block.find(b"\n") + 1
            yield self._alone(self.offset, start + first)
        if first <= last:
            yield from self._pieces(start + first, block[first:last])
        # What comes after the last line end is read again with what follows it.
        self.offset = self._searched = start + last + 1

    def _pieces(self, start: int, raw: bytes) -> Iterator[Stretch]:
        if len(raw) <= LINE_LIMIT_BYTES or max(map(len, raw.split(b"\n"))) <= LINE_LIMIT_BYTES:
            yield Stretch(start=start, end=start + len(raw) + 1, raw=raw)
            return
        for line in raw.split(b"\n"):
            yield self._alone(start, start + len(line) + 1)
            start += len(line) + 1

    def _alone(self, start: int, end: int) -> Stretch:
        return Stretch(start=start, end=end, raw=line_at(self._path, start, end).marked)
