"""Plays a route on a backend: one engine for every operation, route and transport.

A round is one exchange. What is added to elements that are not sent in the same round is added as
it arrives, piece by piece, while it is still in the cache. Otherwise, and where several ranks send
the same elements, messages are received into scratch memory and combined afterwards.

The order of the operands is that of the ranks, the own ones included. It matters for more than two
of them, and for the payload of a NaN: so all ranks that compute an element get the same bits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Backend, Tag, Target
from muster.collectives.deadline import Deadline
from muster.collectives.routes import Piece, Round, Route

Array: TypeAlias = NDArray[Any]


class Combine(Protocol):
    """Writes the combination of two arrays to a third, which may be one of them."""

    # By keyword: numpy deprecates a third operand of minimum and maximum by position.
    def __call__(self, left: Array, right: Array, /, *, out: Array) -> object: ...


MESSAGE_BYTES: Final = 64 << 20
"""Larger pieces are cut, well below the receiver's limit."""

PIECE_ELEMENTS: Final = 32_768
"""Combined at once, so that a partial result is in the cache for the next operand."""

SCRATCH_BYTES: Final = 64 << 20
"""Kept between operations."""

ALIGNMENT_BYTES: Final = 64


def in_float32(combine: Callable[[Array, Array], Array]) -> Combine:
    """Return the same for bfloat16 as uint16; the result is rounded to nearest, ties to even."""

    def combine_bfloat16(left: Array, right: Array, /, *, out: Array) -> None:
        narrow(combine(widen(left), widen(right)), out)

    return combine_bfloat16


def widen(array: Array) -> NDArray[np.float32]:
    """Return bfloat16, given as uint16, as float32."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def narrow(array: NDArray[np.float32], out: Array) -> None:
    """Write float32 as bfloat16, rounded to nearest, ties to even; a NaN stays one."""
    bits = array.view(np.uint32)
    # Adding half a unit carries into the exponent where it must; a NaN must not be carried away.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    out[...] = np.where(np.isnan(array), (bits >> 16) | 0x40, rounded)


class Window:
    """A flat array that stands for the elements of a buffer from `start` on."""

    def __init__(self, array: Array, start: int = 0) -> None:
        self.array = array
        self._start = start
        self._bytes = array.data.cast("B") if array.size else memoryview(b"")
        self._itemsize = array.itemsize

    def elements(self, piece: Piece) -> Array:
        return self.array[piece.start - self._start : piece.stop - self._start]

    def messages(self, piece: Piece) -> Iterator[memoryview]:
        """Yield the memory of a piece, cut into messages."""
        start = (piece.start - self._start) * self._itemsize
        stop = (piece.stop - self._start) * self._itemsize
        for at in range(start, stop, MESSAGE_BYTES):
            yield self._bytes[at : min(at + MESSAGE_BYTES, stop)]


class Addend:
    """A message that is combined with `elements` as it arrives."""

    def __init__(self, elements: Array, combine: Combine, *, is_left: bool) -> None:
        self.nbytes = elements.nbytes
        self._elements = elements
        self._combine = combine
        self._is_left = is_left

    def put(self, offset: int, data: memoryview) -> None:
        """Combine; the left operand is that of the lower rank."""
        operand = np.frombuffer(data, self._elements.dtype)
        start = offset // operand.itemsize
        own = self._elements[start : start + operand.size]
        if self._is_left:
            self._combine(operand, own, out=own)
        else:
            self._combine(own, operand, out=own)


class Scratch:
    """Memory for what is received before it is combined; touching new pages costs more."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._used = 0

    def like(self, array: Array) -> Array:
        """Return memory as large as `array`, until `reset`."""
        start = self._used
        self._used = -(-(start + array.nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._used > self._memory.size:
            # Pieces handed out before keep the memory that they lie in.
            self._memory, start = np.empty(max(self._used, 1 << 20), np.uint8), 0
            self._used = array.nbytes
        return self._memory[start : start + array.nbytes].view(array.dtype)

    def reset(self) -> None:
        """Take back all that was handed out, and give back more than is worth keeping."""
        self._used = 0
        if self._memory.size > SCRATCH_BYTES:
            self._memory = np.empty(0, np.uint8)


class Player:
    """Plays routes of one operation."""

    def __init__(
        self, backend: Backend, tag: Tag, combine: Combine, deadline: Deadline, scratch: "Scratch"
    ) -> None:
        self._backend = backend
        self._tag = tag
        self._combine = combine
        self._deadline = deadline
        self._scratch = scratch

    def play(self, route: Route, source: Window, target: Window) -> None:
        """Send from `source` and receive into `target`, which may be the same memory."""
        for turn in route:
            if turn.sends or turn.copies or turn.adds:
                self._play_round(turn, source, target)

    def exchange(
        self, outgoing: list[tuple[int, memoryview]], incoming: list[tuple[int, Target]]
    ) -> None:
        """Exchange messages of this operation."""
        self._backend.exchange(
            outgoing, incoming, tag=self._tag, timeout_seconds=self._deadline.left_seconds
        )

    def _play_round(self, turn: Round, source: Window, target: Window) -> None:
        outgoing = [
            (piece.peer, message) for piece in turn.sends for message in source.messages(piece)
        ]
        incoming: list[tuple[int, Target]] = [
            (piece.peer, message) for piece in turn.copies for message in target.messages(piece)
        ]
        adds: defaultdict[tuple[int, int], list[Piece]] = defaultdict(list)
        for piece in turn.adds:
            adds[piece.start, piece.stop].append(piece)
        later: list[tuple[Piece, list[Array]]] = []
        for pieces in adds.values():
            if len(pieces) == 1 and not _is_sent(pieces[0], turn):
                incoming += self._streamed(pieces[0], target)
                continue
            pieces.sort()
            received = [self._scratch.like(target.elements(piece)) for piece in pieces]
            later.append((pieces[0], received))
            for piece, array in zip(pieces, received, strict=True):
                whole = Piece(piece.peer, 0, array.size)
                incoming += [(piece.peer, it) for it in Window(array).messages(whole)]
        self.exchange(outgoing, incoming)
        for piece, received in later:
            place = sum(it.peer < self._backend.rank for it in adds[piece.start, piece.stop])
            combine_all(self._combine, target.elements(piece), place, received)
        self._scratch.reset()

    def _streamed(self, piece: Piece, target: Window) -> Iterator[tuple[int, Target]]:
        elements = target.elements(piece)
        step = MESSAGE_BYTES // elements.itemsize
        for start in range(0, elements.size, step):
            part = elements[start : start + step]
            yield piece.peer, Addend(part, self._combine, is_left=piece.peer < self._backend.rank)


def combine_all(combine: Combine, own: Array, place: int, received: list[Array]) -> None:
    """Write to `own` the combination of all in ascending order of rank; own is at `place`."""
    operands = [*received[:place], own, *received[place:]]
    for start in range(0, own.size, PIECE_ELEMENTS):
        first, *others = (operand[start : start + PIECE_ELEMENTS] for operand in operands)
        result, piece = first, own[start : start + PIECE_ELEMENTS]
        for number, operand in enumerate(others, 1):
            # Until its turn has come, our own piece must keep what it holds.
            out = piece if number >= place else first
            combine(result, operand, out=out)
            result = out


def _is_sent(piece: Piece, turn: Round) -> bool:
    return any(piece.start < sent.stop and sent.start < piece.stop for sent in turn.sends)
