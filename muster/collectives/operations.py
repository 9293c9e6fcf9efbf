"""The collective operations, on any backend.

    all_reduce(backend, gradient, op="mean")
    handle = all_gather(backend, part, async_op=True)
    ...
    whole = handle.wait()

All ranks of a group call the same operations in the same order, with arrays of the same size and
data type. Operations of one group run in the order in which they are called, those of different
groups interleave. An operation that fails on one rank fails on all: with the error of its own
there, and with `Aborted`, `ChannelClosed` or `Timeout` elsewhere. The next operation may succeed,
because its messages never meet those of an earlier one.

bfloat16 is an array of uint16 with ``dtype="bfloat16"``, and is added in float32.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np

from muster.collectives.backend import MESSAGE, TIMEOUT_SECONDS, Backend, Data, Tag, Target
from muster.collectives.calls import Call
from muster.collectives.deadline import Deadline
from muster.collectives.engine import MESSAGE_BYTES, Array, Player, Scratch, Window
from muster.collectives.errors import SizeMismatch, Unsupported
from muster.collectives.operation_queue import Handle, queue_of
from muster.collectives.plans import BARRIER, Plan, plan_of

Op: TypeAlias = Literal["sum", "mean", "min", "max"]
Options = ParamSpec("Options")
Result = TypeVar("Result")

_SIZE: Final = struct.Struct("<Q")


Outcome: TypeAlias = Any
"""The result, or a `Handle` of it if ``async_op`` is set."""


def _collective(
    prepare: Callable[Concatenate[Backend, Options], Outcome],
) -> Callable[Concatenate[Backend, Options], Outcome]:
    """Run what `prepare` returns; what it raises ends the operation on all ranks.

    A call whose arguments are refused has to be counted: if it were not, this rank would call its
    next operation when the others call the one after that.
    """

    @wraps(prepare)
    def call(backend: Backend, /, *arguments: Options.args, **options: Options.kwargs) -> Outcome:
        try:
            start = prepare(backend, *arguments, **options)
        except Exception as error:
            fail = partial(_fail, backend, error)
            queue, refused = queue_of(backend), Call(prepare.__name__)
            if not options.get("async_op"):
                return queue.run(refused, fail)
            queue.submit(refused, fail)
            raise
        return start()

    return call


def fail_operation(backend: Backend, name: str, reason: str) -> None:
    """Count an operation that this rank refuses, and end it on the other ranks."""
    with suppress(Unsupported):
        queue_of(backend).run(Call(name), partial(_fail, backend, Unsupported(reason)))


def _fail(backend: Backend, error: Exception, sequence: int) -> None:
    backend.abort(Tag(sequence=sequence), str(error))
    raise error


@_collective
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
    plan = plan_of(backend, array, Call("all_reduce", op, dtype or "", route, 0, array.size))
    flat = _writable(array)

    def work(player: Player) -> Array:
        window = Window(flat)
        player.play(plan.script, window, window)
        plan.finish(flat, backend.world_size)
        return _put_back(flat, array)

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


@_collective
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
    plan = plan_of(backend, array, Call("reduce", op, dtype or "", route, root, array.size))
    flat = _writable(array) if backend.rank == root else _flat_of(array)

    def work(player: Player) -> Array:
        is_root = backend.rank == root
        # Other ranks combine what passes through them, but their own array stays as it is.
        has_adds = any(turn.streamed or turn.gathered for turn in plan.script)
        window = Window(flat.copy() if has_adds and not is_root else flat)
        player.play(plan.script, window, window)
        if is_root:
            plan.finish(flat, backend.world_size)
        return _put_back(flat, array) if is_root else array

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


@_collective
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
    plan = plan_of(backend, array, Call("broadcast", "", dtype or "", route, root, array.size))
    flat = _writable(array)  # also on the root, whose parts come back in a ring

    def work(player: Player) -> Array:
        window = Window(flat)
        player.play(plan.script, window, window)
        return _put_back(flat, array)

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


@_collective
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
    whole = _whole(backend, array, out)
    plan = plan_of(backend, whole, Call("all_gather", "", dtype or "", route, 0, whole.size))
    flat = whole.reshape(-1)

    def work(player: Player) -> Array:
        start = backend.rank * array.size
        own = flat[start : start + array.size]
        if not array.flags.c_contiguous or own.ctypes.data != array.ctypes.data:
            own[...] = array.reshape(-1)
        window = Window(flat)
        player.play(plan.script, window, window)
        return whole

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


@_collective
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
    flat = _flat_of(array)
    count = flat.size * backend.world_size
    plan = plan_of(backend, array, Call("gather", "", dtype or "", route, root, count))

    def work(player: Player) -> Array | None:
        start = backend.rank * flat.size
        if not is_root:
            window = Window(flat, start)
            player.play(plan.script, window, window)
            return None
        whole = np.empty((backend.world_size, *array.shape), array.dtype)
        whole[root] = array
        window = Window(whole.reshape(-1))
        player.play(plan.script, window, window)
        return whole

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


@_collective
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
    flat = _writable(out)
    count = flat.size * backend.world_size
    plan = plan_of(backend, out, Call("scatter", "", dtype or "", route, root, count))
    whole = None
    if backend.rank == root:
        if array is None or array.dtype != out.dtype:
            raise Unsupported(f"scatter needs an array of {out.dtype} on the root: pass one")
        whole = np.ascontiguousarray(array)
        if whole.size != count:
            raise SizeMismatch(count * out.itemsize, whole.nbytes)

    def work(player: Player) -> Array:
        start = backend.rank * flat.size
        window = Window(flat, start)
        source = window if whole is None else Window(whole.reshape(-1))
        player.play(plan.script, source, window)
        if whole is not None:
            flat[...] = whole.reshape(-1)[start : start + flat.size]
        return _put_back(flat, out)

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


@_collective
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
    flat = _flat_of(array)
    size = flat.size // backend.world_size
    rows = array.shape[0] // backend.world_size
    shape = (rows, *array.shape[1:])[rows == 1 :]
    part = np.empty(shape, array.dtype) if out is None else out
    _check_out(part, size, array)
    if np.may_share_memory(part, flat):  # it is written while the input is still being sent
        flat = flat.copy()

    def work(player: Player) -> Array:
        start = backend.rank * size
        own = part.reshape(-1)
        own[...] = flat[start : start + size]
        if len(plan.script) <= 1:  # no partial sum passes through, so the input can stay
            player.play(plan.script, Window(flat), Window(own, start))
        else:
            window = Window(flat.copy())
            player.play(plan.script, window, window)
            own[...] = window.array[start : start + size]
        plan.finish(own, backend.world_size)
        return part

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


@_collective
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
        _check_out(target, target.size, arrays[0])
    way = "auto" if out is None else "direct"  # which differ if only some ranks know the sizes
    plan = plan_of(backend, arrays[0], Call("all_to_all", "", dtype or "", way, 0, 0))
    flats = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    if any(np.may_share_memory(target, flat) for target in out or () for flat in flats):
        flats = [flat.copy() for flat in flats]

    def work(player: Player) -> list[Array]:
        rank = backend.rank
        peers = [(rank + step) % backend.world_size for step in range(1, backend.world_size)]
        targets = list(out) if out is not None else _empty_for(player, flats, peers)
        into = [target.reshape(-1) for target in targets]
        if into[rank].size != flats[rank].size:
            raise SizeMismatch(into[rank].nbytes, flats[rank].nbytes)
        into[rank][...] = flats[rank]
        player.exchange(
            [(peer, part) for peer in peers for part in _parts(flats[peer])],
            [(peer, part) for peer in peers for part in _parts(into[peer])],
        )
        return targets

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


@_collective
def barrier(
    backend: Backend, *, timeout_seconds: float = TIMEOUT_SECONDS, async_op: bool = False
) -> Outcome:
    """Return when every rank has called this, after its earlier operations."""

    def work(player: Player) -> None:
        # As `Backend.barrier`, but these messages also say that this rank called a barrier.
        distance, nothing = 1, memoryview(bytearray())
        while distance < backend.world_size:
            to, source = (backend.rank + distance), (backend.rank - distance)
            player.exchange(
                [(to % backend.world_size, nothing)], [(source % backend.world_size, nothing)]
            )
            distance *= 2

    return _perform(backend, BARRIER, work, timeout_seconds, async_op=async_op)


def all_gather_bytes(
    backend: Backend, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Data]:
    """Return the data of every rank, in rank order; sizes may differ.

    It is a plain exchange of messages: no other operation of the group may be under way.
    """
    player = Player(backend, MESSAGE, np.add, Deadline(timeout_seconds, "an all-gather"), Scratch())
    peers = [peer for peer in range(backend.world_size) if peer != backend.rank]
    own = memoryview(data).cast("B")
    counts: dict[int, Target] = {peer: memoryview(bytearray(_SIZE.size)) for peer in peers}
    size = memoryview(_SIZE.pack(own.nbytes))
    player.exchange([(peer, size) for peer in peers], list(counts.items()))
    gathered: dict[int, Data] = {}
    for peer, count in counts.items():
        gathered[peer] = bytearray(_SIZE.unpack(count)[0])  # type: ignore[arg-type]
    player.exchange(
        [(peer, part) for peer in peers for part in _cut(own)],
        [(peer, part) for peer in peers for part in _cut(memoryview(gathered[peer]))],
    )
    gathered[backend.rank] = data
    return [gathered[rank] for rank in range(backend.world_size)]


def _perform(
    backend: Backend,
    plan: Plan,
    work: Callable[[Player], Result],
    timeout_seconds: float,
    *,
    async_op: bool,
) -> Callable[[], Result | Handle[Result]]:
    """Return what runs `work` in the order of the group, and ends it on all ranks if it fails."""
    queue = queue_of(backend)
    call = plan.call

    def run(sequence: int) -> Result:
        tag = Tag(sequence=sequence, call=plan.code)
        deadline = Deadline(timeout_seconds, call.operation)
        player = Player(backend, tag, plan.combine, deadline, queue.scratch)
        try:
            with np.errstate(all="ignore"):  # overflow and NaN are results like any others
                if plan.must_meet:
                    _meet(player, backend)
                return work(player)
        except BaseException as error:
            # Also if another rank aborted it. A rank that waits for this one reads what comes from
            # here; what that other rank sent it may stand behind a message that nobody awaits.
            backend.abort(tag, str(error))
            raise

    return lambda: queue.submit(call, run) if async_op else queue.run(call, run)


def _meet(player: Player, backend: Backend) -> None:
    """Exchange empty messages: ranks whose arrays are not empty would otherwise wait."""
    peers = [peer for peer in range(backend.world_size) if peer != backend.rank]
    nothing = memoryview(bytearray())
    player.exchange([(peer, nothing) for peer in peers], [(peer, nothing) for peer in peers])


def _flat_of(array: Array) -> Array:
    """Return all elements as one contiguous array: the memory of `array` itself if it can be."""
    return np.ascontiguousarray(array).reshape(-1)


def _writable(array: Array) -> Array:
    """Return the same of an array that the operation writes to."""
    if not array.flags.writeable:
        raise Unsupported("the array is read-only, and the result is put there: pass a copy")
    return _flat_of(array)


def _put_back(flat: Array, array: Array) -> Array:
    """Write what was computed in a contiguous copy back to where it came from."""
    if not array.flags.c_contiguous:
        array[...] = flat.reshape(array.shape)
    return array


def _whole(backend: Backend, part: Array, whole: Array | None) -> Array:
    """Return memory for a part of each rank."""
    if whole is None:
        return np.empty((backend.world_size, *part.shape), part.dtype)
    _check_out(whole, part.size * backend.world_size, part)
    return whole


def _check_out(out: Array, size: int, like: Array) -> None:
    if out.dtype != like.dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise Unsupported(
            f"the output has to be a contiguous, writable array of {like.dtype}: use numpy.empty"
        )
    if out.size != size:
        raise SizeMismatch(size * like.itemsize, out.nbytes)


def _empty_for(player: Player, flats: Sequence[Array], peers: Sequence[int]) -> list[Array]:
    """Return arrays for what the peers send, after they told how much that is."""
    counts = {peer: bytearray(_SIZE.size) for peer in peers}
    player.exchange(
        [(peer, memoryview(_SIZE.pack(flats[peer].size))) for peer in peers],
        [(peer, memoryview(count)) for peer, count in counts.items()],
    )
    dtype = flats[0].dtype
    sizes = [
        _SIZE.unpack(counts[peer])[0] if peer in counts else flats[peer].size
        for peer in range(len(flats))
    ]
    return [np.empty(size, dtype) for size in sizes]


def _parts(array: Array) -> Iterator[memoryview]:
    return _cut(array.data.cast("B") if array.size else memoryview(bytearray()))


def _cut(flat: memoryview) -> Iterator[memoryview]:
    # One message even of nothing: the receiver may expect more, and would wait for it.
    for start in range(0, max(1, flat.nbytes), MESSAGE_BYTES):
        yield flat[start : start + MESSAGE_BYTES]
