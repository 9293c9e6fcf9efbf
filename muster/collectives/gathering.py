"""Broadcast and all-gather over any backend."""

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from muster.collectives.backend import TIMEOUT_SECONDS, Backend, Data
from muster.collectives.deadline import Deadline
from muster.collectives.errors import InvalidRank

PIECE_BYTES: Final = 1 << 20
"""A rank of the chain forwards one piece while it receives the next."""

MESSAGE_BYTES: Final = 64 << 20
"""Larger data is split into messages well below the receiver's length limit."""

_SIZE: Final = struct.Struct("<Q")


def broadcast(
    backend: Backend,
    data: Data | None,
    *,
    root: int = 0,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Data:
    """Return the root's `data` on every rank; the others pass None.

    The data moves along a chain of ranks, in pieces: each rank receives and sends it once.
    """
    if not 0 <= root < backend.world_size:
        raise InvalidRank(root, backend.world_size)
    deadline = Deadline(timeout_seconds, "a broadcast")
    chain = [(root + place) % backend.world_size for place in range(backend.world_size)]
    place = chain.index(backend.rank)
    source = chain[place - 1] if place else None
    sinks = chain[place + 1 : place + 2]
    size = bytearray(_SIZE.pack(0 if data is None else memoryview(data).nbytes))
    _pass_on(backend, memoryview(size), source, sinks, deadline)
    whole = data if source is None and data is not None else bytearray(*_SIZE.unpack(size))
    for piece in _cut(memoryview(whole), PIECE_BYTES):
        _pass_on(backend, piece, source, sinks, deadline)
    return whole


def all_gather(
    backend: Backend, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Data]:
    """Return the data of every rank, in rank order; sizes may differ."""
    deadline = Deadline(timeout_seconds, "an all-gather")
    own = _SIZE.pack(memoryview(data).nbytes)
    sizes = _all_to_all(backend, own, [_SIZE.size] * backend.world_size, deadline)
    return _all_to_all(backend, data, [_SIZE.unpack(size)[0] for size in sizes], deadline)


def _pass_on(
    backend: Backend,
    piece: memoryview,
    source: int | None,
    sinks: Sequence[int],
    deadline: Deadline,
) -> None:
    if source is not None:
        backend.receive_into(source, piece, timeout_seconds=deadline.left_seconds)
    for sink in sinks:
        backend.send(sink, piece, timeout_seconds=deadline.left_seconds)


def _all_to_all(
    backend: Backend, data: Data, sizes: Sequence[int], deadline: Deadline
) -> list[Data]:
    peers = [rank for rank in range(backend.world_size) if rank != backend.rank]
    gathered: dict[int, Data] = {peer: bytearray(sizes[peer]) for peer in peers}
    backend.exchange(
        [(peer, part) for peer in peers for part in _cut(memoryview(data), MESSAGE_BYTES)],
        [
            (peer, part)
            for peer in peers
            for part in _cut(memoryview(gathered[peer]), MESSAGE_BYTES)
        ],
        timeout_seconds=deadline.left_seconds,
    )
    gathered[backend.rank] = data
    return [gathered[rank] for rank in range(backend.world_size)]


def _cut(data: memoryview, piece_bytes: int) -> Iterator[memoryview]:
    flat = data.cast("B")
    for start in range(0, flat.nbytes, piece_bytes):
        yield flat[start : start + piece_bytes]
