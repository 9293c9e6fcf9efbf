"""The collective operations, on any backend.

    all_reduce(backend, gradient, op="mean")
    handle = all_gather(backend, part, async_op=True)
    ...
    whole = handle.wait()

All ranks of a group call the same operations in the same order, with arrays of the same size and
data type. Operations of one group run in the order in which they are called, those of different
groups interleave. An operation that fails on one rank fails on all: with the error of its own
there, and with `Aborted`, `ChannelClosed` or `Timeout` elsewhere. The next operation may succeed,
because its messages never match those of an earlier one.

bfloat16 is an array of uint16 with ``dtype="bfloat16"``, and is added in float32.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from muster.collectives.backend import TIMEOUT_SECONDS, Backend, Data, barrier_rounds
from muster.collectives.calls import Call, Op
from muster.collectives.engine import MESSAGE_BYTES, Array, Executor, Window
from muster.collectives.errors import SizeMismatch, Unsupported
from muster.collectives.operation_queue import Outcome, collective, perform
from muster.collectives.planning.plans import (
    BARRIER,
    check_out,
    flat_of,
    plan_of,
    put_back,
    writable,
)
from muster.collectives.routes import peers_after

_SIZE: Final = struct.Struct("<Q")


@collective
def all_reduce(
    backend: Backend,
    array: Array,
    op: Op = "sum",
    *,
    route: str = "auto",
    dtype: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    async_op: bool = False,
) -> Outcome:
    """Combine the arrays of all ranks in place, with the same bits everywhere; return `array`."""
    flat = writable(array)
    plan = plan_of(backend, array, Call("all_reduce", op, dtype or "", route, 0, flat.size))

    def work(executor: Executor) -> Array:
        executor.run(plan.schedule, Window(flat))
        plan.finish(flat, backend.world_size)
        return put_back(flat, array)

    return perform(backend, plan, work, timeout_seconds, async_op=async_op)


@collective
def reduce(
    backend: Backend,
    array: Array,
    op: Op = "sum",
    *,
    root: int = 0,
    route: str = "auto",
    dtype: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    async_op: bool = False,
) -> Outcome:
    """Combine the arrays of all ranks in that of `root`; return `array`, elsewhere unchanged."""
    flat = writable(array) if backend.rank == root else flat_of(array)
    plan = plan_of(backend, array, Call("reduce", op, dtype or "", route, root, flat.size))

    def work(executor: Executor) -> Array:
        is_root = backend.rank == root
        # Other ranks combine what passes through them, but their own array stays as it is.
        has_adds = any(step.streamed or step.gathered for step in plan.schedule)
        executor.run(plan.schedule, Window(flat.copy() if has_adds and not is_root else flat))
        if is_root:
            plan.finish(flat, backend.world_size)
        return put_back(flat, array) if is_root else array

    return perform(backend, plan, work, timeout_seconds, async_op=async_op)


@collective
def broadcast(
    backend: Backend,
    array: Array,
    *,
    root: int = 0,
    route: str = "auto",
    dtype: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    async_op: bool = False,
) -> Outcome:
    """Copy the array of `root` into those of all ranks; return `array`."""
    flat = writable(array)  # also on the root, whose parts come back in a ring
    plan = plan_of(backend, array, Call("broadcast", "", dtype or "", route, root, flat.size))

    def work(executor: Executor) -> Array:
        executor.run(plan.schedule, Window(flat))
        return put_back(flat, array)

    return perform(backend, plan, work, timeout_seconds, async_op=async_op)


@collective
def all_gather(
    backend: Backend,
    array: Array,
    *,
    out: Array | None = None,
    route: str = "auto",
    dtype: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    async_op: bool = False,
) -> Outcome:
    """Return the arrays of all ranks in rank order, (world_size, …).

    They are put into `out` if it is given, contiguous and of as many elements.
    """
    count = array.size * backend.world_size
    whole = np.empty((backend.world_size, *array.shape), array.dtype) if out is None else out
    check_out(whole, count, array)
    plan = plan_of(backend, whole, Call("all_gather", "", dtype or "", route, 0, count))
    flat = whole.reshape(-1)

    def work(executor: Executor) -> Array:
        start = backend.rank * array.size
        own = flat[start : start + array.size]
        # Parts that lie in the output already, as those of sharded training, are not copied.
        if not array.flags.c_contiguous or own.ctypes.data != array.ctypes.data:
            own[...] = array.reshape(-1)
        executor.run(plan.schedule, Window(flat))
        return whole

    return perform(backend, plan, work, timeout_seconds, async_op=async_op)


@collective
def gather(
    backend: Backend,
    array: Array,
    *,
    root: int = 0,
    route: str = "auto",
    dtype: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    async_op: bool = False,
) -> Outcome:
    """Return the arrays of all ranks, (world_size, …), on `root`, and None elsewhere."""
    is_root = backend.rank == root
    flat = flat_of(array)
    count = flat.size * backend.world_size
    plan = plan_of(backend, array, Call("gather", "", dtype or "", route, root, count))

    def work(executor: Executor) -> Array | None:
        start = backend.rank * flat.size
        if not is_root:  # it receives nothing, so the part is sent from where it is
            executor.run(plan.schedule, Window(flat, start))
            return None
        whole = np.empty((backend.world_size, *array.shape), array.dtype)
        whole[root] = array
        executor.run(plan.schedule, Window(whole.reshape(-1)))
        return whole

    return perform(backend, plan, work, timeout_seconds, async_op=async_op)


@collective
def scatter(
    backend: Backend,
    array: Array | None,
    out: Array,
    *,
    root: int = 0,
    route: str = "auto",
    dtype: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    async_op: bool = False,
) -> Outcome:
    """Put part r of the array of `root`, (world_size, …), into `out` of rank r; return it.

    Other ranks pass None.
    """
    flat = writable(out)
    count = flat.size * backend.world_size
    plan = plan_of(backend, out, Call("scatter", "", dtype or "", route, root, count))
    whole = None
    if backend.rank == root:
        if array is None or array.dtype != out.dtype:
            raise Unsupported(f"scatter needs an array of {out.dtype} on the root: pass one")
        whole = np.ascontiguousarray(array)
        if whole.size != count:
            raise SizeMismatch(count * out.itemsize, whole.nbytes)

    def work(executor: Executor) -> Array:
        start = backend.rank * flat.size
        window = Window(flat, start)
        source = window if whole is None else Window(whole.reshape(-1))
        executor.run(plan.schedule, source, window)
        if whole is not None:
            flat[...] = whole.reshape(-1)[start : start + flat.size]
        return put_back(flat, out)

    return perform(backend, plan, work, timeout_seconds, async_op=async_op)


@collective
def reduce_scatter(
    backend: Backend,
    array: Array,
    op: Op = "sum",
    *,
    out: Array | None = None,
    route: str = "auto",
    dtype: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    async_op: bool = False,
) -> Outcome:
    """Return part r of the combination of all arrays, (world_size, …), on rank r.

    The first axis of `array` has world_size parts of equal size, or as many elements. The part is
    put into `out` if it is given, contiguous and of as many elements. `array` stays as it is.
    """
    if array.ndim == 0 or array.shape[0] % backend.world_size:
        raise Unsupported(
            f"an array of shape {array.shape} has no {backend.world_size} equal parts: "
            "pad its first axis"
        )
    plan = plan_of(backend, array, Call("reduce_scatter", op, dtype or "", route, 0, array.size))
    flat = flat_of(array)
    size = flat.size // backend.world_size
    rows = array.shape[0] // backend.world_size
    shape = array.shape[1:] if rows == 1 else (rows, *array.shape[1:])
    part = np.empty(shape, array.dtype) if out is None else out
    check_out(part, size, array)
    if np.may_share_memory(part, flat):  # it is written while the input is still being sent
        flat = flat.copy()

    def work(executor: Executor) -> Array:
        start = backend.rank * size
        own = part.reshape(-1)
        own[...] = flat[start : start + size]
        if len(plan.schedule) <= 1:  # no partial sum passes through, so the input can stay
            executor.run(plan.schedule, Window(flat), Window(own, start))
        else:
            window = Window(flat.copy())
            executor.run(plan.schedule, window)
            own[...] = window.array[start : start + size]
        plan.finish(own, backend.world_size)
        return part

    return perform(backend, plan, work, timeout_seconds, async_op=async_op)


@collective
def all_to_all(
    backend: Backend,
    arrays: Sequence[Array],
    *,
    out: Sequence[Array] | None = None,
    dtype: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    async_op: bool = False,
) -> Outcome:
    """Send ``arrays[r]`` to rank r; return what each rank sent to this one, in rank order.

    Sizes may differ. What comes is put into the contiguous arrays `out` if they are given, or into
    new, flat ones, whose sizes travel first. All ranks pass `out`, or none.
    """
    if len(arrays) != backend.world_size:
        raise Unsupported(
            f"{len(arrays)} arrays do not fit {backend.world_size} ranks: pass one for each"
        )
    if any(array.dtype != arrays[0].dtype for array in arrays):
        raise Unsupported("all_to_all needs arrays of one data type: convert them first")
    if out is not None and len(out) != backend.world_size:
        raise Unsupported(
            f"{len(out)} outputs do not fit {backend.world_size} ranks: pass one each"
        )
    for target in out or ():
        check_out(target, target.size, arrays[0])
    way = "auto" if out is None else "direct"  # which differ if only some ranks know the sizes
    plan = plan_of(backend, arrays[0], Call("all_to_all", "", dtype or "", way, 0, 0))
    flats = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    # A target is written while what shares its memory is still being sent.
    if any(np.may_share_memory(target, flat) for target in out or () for flat in flats):
        flats = [flat.copy() for flat in flats]

    def work(executor: Executor) -> list[Array]:
        rank, peers = backend.rank, peers_after(backend.rank, backend.world_size)
        targets = list(out) if out is not None else _empty_for(executor, flats, peers)
        into = [target.reshape(-1) for target in targets]
        if into[rank].size != flats[rank].size:
            raise SizeMismatch(into[rank].nbytes, flats[rank].nbytes)
        into[rank][...] = flats[rank]
        executor.exchange(
            [(peer, part) for peer in peers for part in messages_of(flats[peer])],
            [(peer, part) for peer in peers for part in messages_of(into[peer])],
        )
        return targets

    return perform(backend, plan, work, timeout_seconds, async_op=async_op)


@collective
def barrier(
    backend: Backend, *, timeout_seconds: float = TIMEOUT_SECONDS, async_op: bool = False
) -> Outcome:
    """Return when every rank has called this, after its earlier operations."""

    def work(executor: Executor) -> None:
        # As `Backend.barrier`, but these messages also say that this rank called a barrier.
        nothing = memoryview(bytearray())
        for to, source in barrier_rounds(backend.rank, backend.world_size):
            executor.exchange([(to, nothing)], [(source, nothing)])

    return perform(backend, BARRIER, work, timeout_seconds, async_op=async_op)


def all_gather_bytes(
    backend: Backend, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Data]:
    """Return the data of every rank, in rank order; sizes may differ."""
    own = [np.frombuffer(data, np.uint8)] * backend.world_size
    parts = all_to_all(backend, own, timeout_seconds=timeout_seconds)
    return [part.data for part in parts]


def _empty_for(executor: Executor, flats: Sequence[Array], peers: Sequence[int]) -> list[Array]:
    """Return arrays for what the peers send, after they told how much that is."""
    counts = {peer: bytearray(_SIZE.size) for peer in peers}
    executor.exchange(
        [(peer, memoryview(_SIZE.pack(flats[peer].size))) for peer in peers],
        [(peer, memoryview(count)) for peer, count in counts.items()],
    )
    dtype = flats[0].dtype
    sizes = [
        _SIZE.unpack(counts[peer])[0] if peer in counts else flats[peer].size
        for peer in range(len(flats))
    ]
    return [np.empty(size, dtype) for size in sizes]


def messages_of(array: Array) -> Iterator[memoryview]:
    """Yield the memory of a contiguous array, in pieces that a receiver accepts."""
    flat = array.data.cast("B") if array.size else memoryview(bytearray())
    # One message even of nothing: the receiver may expect more, and would wait for it.
    for start in range(0, max(1, flat.nbytes), MESSAGE_BYTES):
        yield flat[start : start + MESSAGE_BYTES]
