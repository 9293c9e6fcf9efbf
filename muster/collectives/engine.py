"""Runs a route on a backend: one engine for every operation, route and transport.

A round is one exchange. What is added to elements that are not sent in the same round is added as
it arrives, piece by piece, while it is still in the cache. Otherwise, and where several ranks send
the same elements, messages are received into scratch memory and combined afterwards.

The order of the operands is that of the ranks, the own ones included. It matters for more than two
of them, and for the payload of a NaN: so all ranks that compute an element get the same bits.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Backend, Tag, Target
from muster.collectives.deadline import Deadline
from muster.collectives.errors import Timeout
from muster.collectives.routes import Piece, Round, Route

Array: TypeAlias = NDArray[Any]


class Combine(Protocol):
    """A function such as `numpy.add`."""

    def __call__(self, left: Array, right: Array, /, *, out: Array) -> object:
        """Write the combination of two arrays to `out`, which may be one of them."""


MESSAGE_BYTES: Final = 64 << 20
"""Larger pieces are cut, well below the receiver's limit."""

PIECE_ELEMENTS: Final = 32_768
"""Combined at once, so that a partial result is in the cache for the next operand."""

SCRATCH_BYTES: Final = 64 << 20
"""Kept between operations."""

ALIGNMENT_BYTES: Final = 64


def in_float32(combine: np.ufunc) -> Combine:
    """Return `combine` for bfloat16 as uint16; each result is rounded to nearest, ties to even."""

    def combined(left: Array, right: Array, /, *, out: Array) -> None:
        narrow(combine(widen(left), widen(right)), out)

    return combined


def widen(array: Array) -> NDArray[np.float32]:
    """Return bfloat16, given as uint16, as float32."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def narrow(array: NDArray[np.float32], out: Array) -> None:
    """Write float32 as bfloat16, rounded to nearest, ties to even; a NaN stays one."""
    bits = array.view(np.uint32)
    # Adding half a unit carries into the exponent where it must; a NaN must not be carried away.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    out[...] = np.where(np.isnan(array), (bits >> 16) | 0x40, rounded)


class Message(NamedTuple):
    """Bytes [start, stop) of a buffer, to or from `peer`."""

    peer: int
    start: int
    stop: int


class Gathered(NamedTuple):
    """Elements [start, stop) that several ranks send, or that are sent in the same round."""

    start: int
    stop: int
    own_index: int
    """How many of the senders have a lower rank than this one."""
    messages: tuple[tuple[Message, ...], ...]
    """Of each sender, in the order of ranks; bytes of its own scratch memory."""


class Step(NamedTuple):
    """A round, prepared for one rank and size of elements."""

    sends: tuple[Message, ...]
    copies: tuple[Message, ...]
    streamed: tuple[Message, ...]
    """Combined as they arrive."""
    gathered: tuple[Gathered, ...]


Schedule: TypeAlias = tuple[Step, ...]


def schedule_of(route: Route, rank: int, item_bytes: int) -> Schedule:
    """Prepare a route, so that playing it again takes little more than its messages."""
    return tuple(_step(turn, rank, item_bytes) for turn in route if any(turn))


def _step(given: Round, rank: int, item_bytes: int) -> Step:
    adds: defaultdict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in sorted(given.adds):
        adds[piece.start, piece.stop].append(piece)
    streamed: list[Message] = []
    gathered: list[Gathered] = []
    for (start, stop), pieces in adds.items():
        # Adding in place while the same elements are being sent would send sums.
        is_sent = any(start < sent.stop and sent.start < stop for sent in given.sends)
        if len(pieces) == 1 and not is_sent:
            streamed += _cut(pieces, item_bytes)
            continue
        own_index = sum(piece.peer < rank for piece in pieces)
        whole = [_cut([Piece(piece.peer, 0, stop - start)], item_bytes) for piece in pieces]
        gathered.append(Gathered(start, stop, own_index, tuple(map(tuple, whole))))
    sends, copies = _cut(given.sends, item_bytes), _cut(given.copies, item_bytes)
    return Step(tuple(sends), tuple(copies), tuple(streamed), tuple(gathered))


def _cut(pieces: Iterable[Piece], item_bytes: int) -> list[Message]:
    return [
        Message(piece.peer, at, min(at + MESSAGE_BYTES, piece.stop * item_bytes))
        for piece in pieces
        for at in range(piece.start * item_bytes, piece.stop * item_bytes, MESSAGE_BYTES)
    ]


class Window:
    """A flat array that stands for the elements of a buffer from `start` on."""

    def __init__(self, array: Array, start: int = 0) -> None:
        self.array = array
        self.start = start
        self.start_bytes = start * array.itemsize
        self.bytes = array.data.cast("B") if array.size else memoryview(b"")


class Addend:
    """A message that is combined with `elements` as it arrives."""

    def __init__(self, elements: Array, combine: Combine, *, is_left: bool) -> None:
        self.nbytes = elements.nbytes
        self._elements = elements
        self._combine = combine
        self._is_left = is_left

    def put(self, offset: int, data: memoryview) -> None:
        """Combine; the left operand is that of the lower rank."""
        operand = np.frombuffer(data, self._elements.dtype)  # no copy: it is used up on return
        start = offset // operand.itemsize
        own = self._elements[start : start + operand.size]
        # As in `combine_all`, or the payloads of NaN would differ between ranks.
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


class Executor:
    """Runs the routes of one operation."""

    def __init__(
        self, backend: Backend, tag: Tag, combine: Combine, deadline: Deadline, scratch: "Scratch"
    ) -> None:
        self._backend = backend
        self._tag = tag
        self._combine = combine
        self._deadline = deadline
        self._scratch = scratch

    def run(self, schedule: Schedule, source: Window, target: Window | None = None) -> None:
        """Send from `source` and receive into `target`, by default the same memory."""
        for step in schedule:
            self._run_step(step, source, target or source)

    def exchange(
        self, outgoing: list[tuple[int, memoryview]], incoming: list[tuple[int, Target]]
    ) -> None:
        """Exchange messages of this operation."""
        left_seconds = self._deadline.left_seconds
        try:
            self._backend.exchange(outgoing, incoming, tag=self._tag, timeout_seconds=left_seconds)
        except Timeout as error:  # the caller knows the timeout of all rounds together
            raise Timeout(self._deadline.seconds, error.waited_for) from None

    def _run_step(self, step: Step, source: Window, target: Window) -> None:
        data, first = source.bytes, source.start_bytes
        outgoing = [(peer, data[start - first : stop - first]) for peer, start, stop in step.sends]
        data, first = target.bytes, target.start_bytes
        incoming: list[tuple[int, Target]] = [
            (peer, data[start - first : stop - first]) for peer, start, stop in step.copies
        ]
        rank, combine, item_bytes = self._backend.rank, self._combine, target.array.itemsize
        for peer, start, stop in step.streamed:
            own = target.array[(start - first) // item_bytes : (stop - first) // item_bytes]
            incoming.append((peer, Addend(own, combine, is_left=peer < rank)))
        later: list[tuple[Gathered, list[Array]]] = []
        for gathered in step.gathered:
            own = target.array[gathered.start - target.start : gathered.stop - target.start]
            received = [self._scratch.like(own) for _ in gathered.messages]
            later.append((gathered, received))
            for array, messages in zip(received, gathered.messages, strict=True):
                flat = array.data.cast("B")
                incoming += [(peer, flat[start:stop]) for peer, start, stop in messages]
        self.exchange(outgoing, incoming)
        # Only now: these elements may be sent in the same round, and have left our memory here.
        for gathered, received in later:
            own = target.array[gathered.start - target.start : gathered.stop - target.start]
            combine_all(combine, own, gathered.own_index, received)
        if later:
            self._scratch.reset()


def combine_all(combine: Combine, own: Array, own_index: int, received: list[Array]) -> None:
    """Write to `own` the combination of all in ascending order of rank."""
    operands = [*received[:own_index], own, *received[own_index:]]
    for start in range(0, own.size, PIECE_ELEMENTS):
        first, *others = (operand[start : start + PIECE_ELEMENTS] for operand in operands)
        result, piece = first, own[start : start + PIECE_ELEMENTS]
        for number, operand in enumerate(others, 1):
            # Until it is combined, our own piece must keep what it holds.
            out = piece if number >= own_index else first
            combine(result, operand, out=out)
            result = out
        if len(operands) > 2 and own.dtype.kind == "f":  # noqa: PLR2004
            _canonicalise(piece)


def _canonicalise(piece: Array) -> None:
    """Make all NaN alike: which operand's payload is kept depends on where the result goes."""
    if np.isnan(piece.max()):
        piece[np.isnan(piece)] = np.nan
