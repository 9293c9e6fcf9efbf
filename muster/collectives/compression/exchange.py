"""Averages arrays over all ranks in fewer bytes, and keeps what was not sent for the next time.

An exchange is a generator: it yields what the ranks are to exchange, one message for each rank or
an array to add up, and gets what came. So encoding and decoding run in the caller's thread, in the
same order on all ranks, and transfers in the background.

Error feedback (Seide et al., 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019): what
a message does not say of an array is added to the next one.
"""

import math
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np

from muster.collectives.backend import Backend
from muster.collectives.compression.kind import Kind, Vector
from muster.collectives.compression.kinds import Compression, kind_of_array, table_of
from muster.collectives.compression.power_sgd import PowerSGD, matrix_of, orthogonal
from muster.collectives.operation_queue import Outcome, queue_of
from muster.collectives.operations import all_reduce, all_to_all
from muster.contracts.shards import ranges

Exchange: TypeAlias = Generator[Any, Any, Vector]
"""Yields, gets, and returns the sum over all ranks."""

_Placed: TypeAlias = tuple[Kind | None, slice, tuple[int, ...]]


@dataclass
class Compressor:
    """What the arrays of one model share."""

    backend: Backend
    compression: Compression
    feedback: bool
    timeout_seconds: float
    averages: "WeakSet[Average]" = field(default_factory=WeakSet, init=False)

    def __post_init__(self) -> None:
        self.table = table_of(self.compression)
        self.gauges = queue_of(self.backend).gauges

    def count(self, name: str, amount: float) -> None:
        self.gauges[f"compression.{name}"] = self.gauges.get(f"compression.{name}", 0) + amount

    def averages_of(self, shapes: Sequence[tuple[int, ...]]) -> "list[Average]":
        """Return what averages arrays of these shapes, one after another in a flat array."""
        by_kind: defaultdict[str, list[_Placed]] = defaultdict(list)
        start = 0
        for shape in shapes:
            kind = kind_of_array(self.table, shape, feedback=self.feedback)
            place = slice(start, start := start + prod(shape))
            by_kind[repr(kind)].append((kind, place, shape))
        return [Average(self, arrays) for arrays in by_kind.values()]


class Average:
    """Averages the arrays of one kind, in place; None is the kind of those that stay whole."""

    def __init__(self, common: Compressor, arrays: Sequence[_Placed]) -> None:
        self._common = common
        self.square = 0.0
        """The norm of the residual, divided by the number of ranks, squared."""
        common.averages.add(self)
        self._kinds, self._places, self._shapes = zip(*arrays, strict=True)
        self._value = np.zeros(sum(map(prod, self._shapes)), np.float32)
        """What is to be sent, divided by the number of ranks; afterwards what was not."""

    def start(self, flat: Vector) -> None:
        """Begin to average `flat`; it is not to be touched until `finish` returns."""
        self._steps = self._average(flat)
        self._handle = self._go_on(None)

    def finish(self) -> None:
        """Wait for the average. After an error make everything anew: residuals may be lost."""
        while self._handle is not None:
            self._handle = self._go_on(self._handle.wait())

    def _go_on(self, received: object) -> Outcome:
        """Encode or decode, and begin the transfer that follows, if any."""
        backend, start = self._common.backend, time.perf_counter()
        try:
            with np.errstate(all="ignore"):  # overflow and NaN are results like any others
                wanted = self._steps.send(received)
        except StopIteration:
            return None
        finally:
            self._common.count("duration_ms", (time.perf_counter() - start) * 1e3)
        if is_sum := not isinstance(wanted, list):
            sent = ring_bytes(wanted, backend)
        else:
            sent = sum(message.nbytes for message in wanted) - wanted[backend.rank].nbytes
        self._common.count("bytes_after", sent)
        run, seconds = all_reduce if is_sum else all_to_all, self._common.timeout_seconds
        return run(backend, wanted, timeout_seconds=seconds, async_op=True)

    def _average(self, flat: Vector) -> Generator[Any, Any, None]:
        common, value, kind = self._common, self._value, self._kinds[0]
        share = np.float32(1 / common.backend.world_size)
        feedback = common.feedback and kind is not None
        if not feedback:
            value[...] = 0
        parts = _split(value, self._shapes)
        for part, place in zip(parts, self._places, strict=True):
            np.add(part, (flat[place] * share).reshape(part.shape), out=part)
        common.count("bytes_before", ring_bytes(value, common.backend))
        if kind is None:
            total = yield value
        elif isinstance(kind, PowerSGD):
            total = yield from _add_products(self._kinds, parts, feedback=feedback)
        else:
            total = yield from _add_messages(kind, value, common.backend, feedback=feedback)
        for place, part in zip(self._places, _split(total, self._shapes), strict=True):
            flat[place] = part.reshape(-1)
        if feedback:
            square = float(np.dot(value, value))
            if not math.isfinite(square):  # after NaN, or a sum that overflowed
                value[...] = square = 0
            self.square = square
            norm = (
                math.sqrt(sum(each.square for each in common.averages)) * common.backend.world_size
            )
            common.gauges["compression.residual_norm"] = norm
        before, after = (common.gauges[f"compression.bytes_{when}"] for when in ("before", "after"))
        common.gauges["compression.ratio"] = after / before if before else 1.0


def _add_messages(kind: Kind, value: Vector, backend: Backend, *, feedback: bool) -> Exchange:
    """Add the messages of all ranks, in rank order.

    If the sum may be rounded again, each rank adds a slice and sends its sum to all; it keeps what
    that rounding loses. Otherwise each adds all.
    """
    size, world_size = value.size, backend.world_size
    bounds = ranges(size, world_size) if kind.rounds_sums else [(0, size)]
    slices = [value[start:stop] for start, stop in bounds]
    messages = [kind.encode(part) for part in slices]
    if feedback:
        for part, message in zip(slices, messages, strict=True):
            kind.add(message, part, -1)
    own = slices[backend.rank if kind.rounds_sums else 0]
    added = np.zeros_like(own)
    for received in (yield messages if kind.rounds_sums else messages * world_size):
        kind.add(received, added)
    if not kind.rounds_sums:
        return added
    message, total = kind.encode(added), np.zeros_like(value)
    if feedback:
        own += added
        kind.add(message, own, -1)
    for (start, stop), received in zip(bounds, (yield [message] * world_size), strict=True):
        kind.add(received, total[start:stop])
    return total


def _add_products(
    kinds: Sequence[PowerSGD], arrays: Sequence[Vector], *, feedback: bool
) -> Exchange:
    """Add the left factors of all ranks, and the right ones that belong to their sum.

    A rank keeps what its own right factor does not say. The paper's is the difference to the mean,
    which also adds up to what was not sent, but grows with each step where ranks' data differ.
    """
    own = [kind.project(array) for kind, array in zip(kinds, arrays, strict=True)]
    total = yield _flat(own)
    left = [orthogonal(p) for p in _split(total, [factor.shape for factor in own])]
    own = [matrix_of(array).T @ p for array, p in zip(arrays, left, strict=True)]
    for array, p, q in zip(arrays, left, own, strict=True) if feedback else ():
        np.subtract(array, (p @ q.T).reshape(array.shape), out=array)
    right = _split((yield _flat(own)), [factor.shape for factor in own])
    for kind, q in zip(kinds, right, strict=True):
        kind.q = q
    return _flat([p @ q.T for p, q in zip(left, right, strict=True)])


def ring_bytes(array: Vector, backend: Backend) -> int:
    """Return what a rank sends for the sum of an array."""
    return 2 * array.nbytes * (backend.world_size - 1) // backend.world_size


def _flat(arrays: Sequence[Vector]) -> Vector:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _split(flat: Vector, shapes: Sequence[tuple[int, ...]]) -> list[Vector]:
    """Return the arrays that lie in `flat` one after another."""
    parts = np.split(flat, np.cumsum([prod(shape) for shape in shapes])[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
