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
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize

import numpy as np

from muster.collectives.backend import MESSAGE, TIMEOUT_SECONDS, Backend, Data, Tag, Target
from muster.collectives.calls import DTYPES, OPS, Call
from muster.collectives.deadline import Deadline
from muster.collectives.engine import (
    MESSAGE_BYTES,
    Array,
    Combine,
    Player,
    Scratch,
    Script,
    Window,
    in_float32,
    narrow,
    script_of,
    widen,
)
from muster.collectives.errors import (
    Aborted,
    InvalidRank,
    SizeMismatch,
    Timeout,
    Unsupported,
)
from muster.collectives.routes import Problem, choose, route_of
from muster.contracts.shards import ranges

Op: TypeAlias = Literal["sum", "mean", "min", "max"]
Result = TypeVar("Result")

_COMBINES: Final[Mapping[str, np.ufunc]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
}
_SIZE: Final = struct.Struct("<Q")
_LONGEST_WAIT_SECONDS: Final = 30 * 24 * 3600.0


class Handle(Generic[Result]):
    """An operation that runs in the background."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._result: Result

    def done(self) -> bool:
        """Return True if it has ended, with a result or an error."""
        return self._is_over.is_set()

    def wait(self, timeout_seconds: float | None = None) -> Result:
        """Return the result once there is one, or raise the operation's error.

        Raises `Timeout` if it has not ended by then; it goes on.
        """
        seconds = _LONGEST_WAIT_SECONDS if timeout_seconds is None else timeout_seconds
        if not self._is_over.wait(seconds):
            raise Timeout(seconds, "the end of an operation")
        if self._error is not None:
            raise self._error
        return self._result

    result = wait

    def run(self, work: Callable[[], Result]) -> None:
        """Run the operation, in the thread of its group."""
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001  `wait` raises it
            self._error = error
        self._is_over.set()


class _Group:
    """What one backend's operations share: their order, their counters and scratch memory."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, _Counts] = defaultdict(_Counts)
        self.scratch = Scratch()
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._issued = 0
        self._ended = 0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Call, work: Callable[[int], Result]) -> Result:
        """Run `work` with its sequence number, when all that were issued before have ended."""
        with self._lock:
            self._issued = sequence = self._issued + 1
        return self._run_in_turn(call, work, sequence)

    def submit(self, call: Call, work: Callable[[int], Result]) -> Handle[Result]:
        """Do the same in the background."""
        handle: Handle[Result] = Handle()
        with self._lock:
            self._issued = sequence = self._issued + 1
            if self._thread is None:
                name = "muster-collectives"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
            self._queue.put(partial(handle.run, partial(self._run_in_turn, call, work, sequence)))
        return handle

    def end(self) -> None:
        """End the thread once it has nothing left to do."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # or it would keep the backend until the next one

    def _run_in_turn(self, call: Call, work: Callable[[int], Result], sequence: int) -> Result:
        if self._ended != sequence - 1:
            with self._lock:
                while self._ended != sequence - 1:
                    self._turn.wait()
        counts = self.counts[call.operation]
        start = time.perf_counter()
        try:
            result = work(sequence)
            counts.completed += 1
        except BaseException:
            counts.failed += 1
            raise
        finally:
            counts.duration_ms += (time.perf_counter() - start) * 1e3
            counts.bytes_processed += call.size_bytes
            with self._lock:
                self._ended = sequence
                if self._issued > sequence:
                    self._turn.notify_all()
        return result


@dataclass(slots=True)
class _Counts:
    completed: int = 0
    failed: int = 0
    duration_ms: float = 0.0
    bytes_processed: int = 0


_groups: WeakKeyDictionary[Backend, _Group] = WeakKeyDictionary()
_creating: Final = threading.Lock()


def _group_of(backend: Backend) -> _Group:
    group = _groups.get(backend)
    if group is None:
        with _creating:
            group = _groups.setdefault(backend, _Group())
        finalize(backend, group.end)
    return group


def counters(backend: Backend) -> dict[str, float]:
    """Return how often each operation completed and failed, how long it took and its bytes.

    Keys such as ``all_reduce.completed``, ``.failed``, ``.duration_ms`` and ``.bytes_processed``.
    """
    counts = _group_of(backend).counts
    return {
        f"{operation}.{name}": value
        for operation, count in list(counts.items())
        for name, value in asdict(count).items()
    }


Outcome: TypeAlias = Any
"""The result, or a `Handle` of it if ``async_op`` is set."""


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
    plan = _plan_of(backend, "all_reduce", array, dtype, array.size, op=op, route=route)
    flat = _flat_of(array)

    def work(player: Player) -> Array:
        window = Window(flat)
        player.play(plan.script, window, window)
        plan.finish(flat, backend.world_size)
        return _put_back(flat, array)

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


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
    plan = _plan_of(backend, "reduce", array, dtype, array.size, op=op, route=route, root=root)
    flat = _flat_of(array)

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
    plan = _plan_of(backend, "broadcast", array, dtype, array.size, route=route, root=root)
    flat = _flat_of(array)

    def work(player: Player) -> Array:
        window = Window(flat)
        player.play(plan.script, window, window)
        return _put_back(flat, array)

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


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
    plan = _plan_of(backend, "all_gather", whole, dtype, whole.size, route=route)
    flat = whole.reshape(-1)

    def work(player: Player) -> Array:
        start = backend.rank * array.size
        own = flat[start : start + array.size]
        if array.size and own.ctypes.data != array.ctypes.data:
            own[...] = array.reshape(-1)
        window = Window(flat)
        player.play(plan.script, window, window)
        return whole

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


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
    plan = _plan_of(backend, "gather", array, dtype, count, route=route, root=root)

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
    flat = _flat_of(out)
    count = flat.size * backend.world_size
    plan = _plan_of(backend, "scatter", out, dtype, count, route=route, root=root)
    whole = None
    if backend.rank == root:
        whole = _whole(backend, out, None if array is None else np.ascontiguousarray(array))
        if array is None:
            raise Unsupported("scatter needs an array on the root: pass one part for each rank")

    def work(player: Player) -> Array:
        start = backend.rank * flat.size
        window = Window(flat, start)
        source = window if whole is None else Window(whole.reshape(-1))
        player.play(plan.script, source, window)
        if whole is not None:
            flat[...] = whole.reshape(-1)[start : start + flat.size]
        return _put_back(flat, out)

    return _perform(backend, plan, work, timeout_seconds, async_op=async_op)


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
    plan = _plan_of(backend, "reduce_scatter", array, dtype, array.size, op=op, route=route)
    flat = _flat_of(array)
    size = flat.size // backend.world_size
    rows = array.shape[0] // backend.world_size
    shape = (rows, *array.shape[1:])[rows == 1 :]
    part = np.empty(shape, array.dtype) if out is None else out
    _check_out(part, size, array)

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
    way = "auto" if out is None else "direct"
    plan = _plan_of(backend, "all_to_all", arrays[0], dtype, 0, route=way)
    flats = [np.ascontiguousarray(array).reshape(-1) for array in arrays]

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


def barrier(
    backend: Backend, *, timeout_seconds: float = TIMEOUT_SECONDS, async_op: bool = False
) -> Outcome:
    """Return when every rank has called this, after its earlier operations."""

    def work(player: Player) -> None:
        del player
        backend.barrier(timeout_seconds=timeout_seconds)

    return _perform(backend, _BARRIER, work, timeout_seconds, async_op=async_op)


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
    plan: "_Plan",
    work: Callable[[Player], Result],
    timeout_seconds: float,
    *,
    async_op: bool,
) -> Result | Handle[Result]:
    """Run `work` in the order of the group; if it fails, end it on the other ranks as well."""
    group = _group_of(backend)
    call = plan.call

    def run(sequence: int) -> Result:
        tag = Tag(sequence=sequence, call=plan.code)
        deadline = Deadline(timeout_seconds, call.operation)
        player = Player(backend, tag, plan.combine, deadline, group.scratch)
        try:
            with np.errstate(all="ignore"):  # overflow and NaN are results like any others
                if plan.must_meet:
                    _meet(player, backend)
                return work(player)
        except Aborted:
            raise
        except BaseException as error:
            backend.abort(tag, str(error))
            raise

    return group.submit(call, run) if async_op else group.run(call, run)


def _meet(player: Player, backend: Backend) -> None:
    """Exchange empty messages: ranks whose arrays are not empty would otherwise wait."""
    peers = [peer for peer in range(backend.world_size) if peer != backend.rank]
    nothing = memoryview(bytearray())
    player.exchange([(peer, nothing) for peer in peers], [(peer, nothing) for peer in peers])


class _Plan(NamedTuple):
    """All that follows from a call and the place of this rank."""

    call: Call
    code: int
    combine: Combine
    script: Script
    must_meet: bool

    def finish(self, array: Array, world_size: int) -> None:
        """Divide the sum, if the mean is wanted."""
        if self.call.op != "mean":
            return
        if self.call.dtype == "bfloat16":
            narrow(widen(array) / np.float32(world_size), array)
        else:
            np.divide(array, array.dtype.type(world_size), out=array)


_BARRIER: Final = _Plan(Call("barrier"), Call("barrier").code, np.add, (), must_meet=False)


def _plan_of(
    backend: Backend,
    operation: str,
    array: Array,
    dtype: str | None,
    elements: int,
    *,
    op: str = "",
    route: str = "auto",
    root: int = 0,
) -> _Plan:
    """Check what a caller passed, and plan the operation on a buffer of so many elements."""
    wanted = Call(operation, op, dtype or "", route, root, elements)
    return _planned(wanted, array.dtype, backend.rank, backend.world_size, backend.hosts)


@lru_cache(maxsize=512)
def _planned(
    wanted: Call, given: np.dtype[Any], rank: int, world_size: int, hosts: tuple[int, ...]
) -> _Plan:
    """A program repeats few calls, and a plan takes longer than a small message."""
    operation, op, dtype, route, root, elements = wanted
    name = dtype or given.name
    is_bfloat16 = name == "bfloat16" and given == np.uint16
    if name not in DTYPES or not given.isnative or not (is_bfloat16 or name == given.name):
        raise Unsupported(
            f"arrays of {given.str} cannot be sent as {name}: use one of "
            f"{', '.join(DTYPES[1:])}; bfloat16 is uint16 with dtype='bfloat16'"
        )
    if op not in OPS:
        raise Unsupported(f"{operation} has no op {op!r}: use one of {', '.join(OPS[1:])}")
    if op == "mean" and "float" not in name:
        raise Unsupported(f"the mean of {name} is not {name}: use the sum and divide it")
    if not 0 <= root < world_size:
        raise InvalidRank(root, world_size)
    call = Call(operation, op, name, "" if route == "auto" else route, root, elements)
    script: Script = ()
    if operation != "all_to_all":
        bounds = (0, *(stop for _, stop in ranges(elements, world_size)))
        problem = Problem(world_size=world_size, bounds=bounds, root=root, hosts=hosts)
        chosen = call.route or choose(operation, call.size_bytes, problem)
        script = script_of(route_of(operation, chosen, rank, problem), rank, given.itemsize)
    ufunc = _COMBINES.get(op, np.add)
    combine = in_float32(ufunc) if is_bfloat16 else ufunc
    must_meet = elements == 0 and operation != "all_to_all"
    return _Plan(call, call.code, combine, script, must_meet)


def _flat_of(array: Array) -> Array:
    """Return all elements as one contiguous array: the memory of `array` itself if it can be."""
    return np.ascontiguousarray(array).reshape(-1)


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
    if out.dtype != like.dtype or not out.flags.c_contiguous:
        raise Unsupported(
            f"the output has to be a contiguous array of {like.dtype}: use numpy.empty"
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
    return _cut(array.data.cast("B") if array.size else memoryview(b""))


def _cut(flat: memoryview) -> Iterator[memoryview]:
    for start in range(0, flat.nbytes, MESSAGE_BYTES):
        yield flat[start : start + MESSAGE_BYTES]
