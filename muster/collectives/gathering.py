"""All-gather over any backend."""

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from muster.collectives.backend import TIMEOUT_SECONDS, Backend, Data
from muster.collectives.deadline import Deadline

MESSAGE_BYTES: Final = 64 << 20
"""Larger data is split into messages well below the receiver's length limit."""

_SIZE: Final = struct.Struct("<Q")


def all_gather(
    backend: Backend, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Data]:
    """Return the data of every rank, in rank order; sizes may differ."""
    deadline = Deadline(timeout_seconds, "an all-gather")
    own = _SIZE.pack(memoryview(data).nbytes)
    sizes = _all_to_all(backend, own, [_SIZE.size] * backend.world_size, deadline)
    return _all_to_all(backend, data, [_SIZE.unpack(size)[0] for size in sizes], deadline)


def _all_to_all(
    backend: Backend, data: Data, sizes: Sequence[int], deadline: Deadline
) -> list[Data]:
    peers = [rank for rank in range(backend.world_size) if rank != backend.rank]
    gathered: dict[int, Data] = {peer: bytearray(sizes[peer]) for peer in peers}
    backend.exchange(
        [(peer, part) for peer in peers for part in _cut(data)],
        [(peer, part) for peer in peers for part in _cut(gathered[peer])],
        timeout_seconds=deadline.left_seconds,
    )
    gathered[backend.rank] = data
    return [gathered[rank] for rank in range(backend.world_size)]


def _cut(data: Data) -> Iterator[memoryview]:
    flat = memoryview(data).cast("B")
    for start in range(0, flat.nbytes, MESSAGE_BYTES):
        yield flat[start : start + MESSAGE_BYTES]
