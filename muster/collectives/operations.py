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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial, wraps
from queue import SimpleQueue
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, TypeAlias, TypeVar
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
    Window,
    in_float32,
    narrow,
    widen,
)
from muster.collectives.errors import (
    InvalidRank,
    SizeMismatch,
    Timeout,
    Unsupported,
)
from muster.collectives.routes import Problem, Route, check_route, choose, route_of
from muster.contracts.shards import ranges

Op: TypeAlias = Literal["sum", "mean", "min", "max"]
Options = ParamSpec("Options")
Result = TypeVar("Result")
Work: TypeAlias = Callable[[Player], Result]

_COMBINES: Final[Mapping[str, Combine]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
}
_COMBINES_BFLOAT16: Final = {
    "sum": in_float32(np.add),
    "mean": in_float32(np.add),
    "min": in_float32(np.minimum),
    "max": in_float32(np.maximum),
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

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001  `wait` raises it
            self._error = error
        self._is_over.set()


class _Group:
    """What one backend's operations share: their order, their counters and scratch memory."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.scratch = Scratch()
        self._issuing = threading.Lock()
        self._turn = threading.Condition()
        self._issued = 0
        self._ended = 0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Call, work: Callable[[int], Result]) -> Result:
        """Run `work` with its sequence number, when all that were issued before have ended."""
        with self._issuing:
            self._issued += 1
            sequence = self._issued
        return self._run_in_turn(call, work, sequence)

    def submit(self, call: Call, work: Callable[[int], Result]) -> Handle[Result]:
        """Do the same in the background."""
        handle: Handle[Result] = Handle()
        with self._issuing:
            self._issued += 1
            sequence = self._issued
            if self._thread is None:
                name = "muster-collectives"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
            self._queue.put(lambda: handle._run(lambda: self._run_in_turn(call, work, sequence)))  # noqa: SLF001
        return handle

    def end(self) -> None:
        self._queue.put(None)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # it holds the backend, which could not be freed until the next one

    def _run_in_turn(self, call: Call, work: Callable[[int], Result], sequence: int) -> Result:
        with self._turn:
            while self._ended != sequence - 1:
                self._turn.wait()
        start = time.perf_counter()
        outcome = "failed"
        try:
            result = work(sequence)
            outcome = "completed"
        finally:
            self.counters[f"{call.operation}.{outcome}"] += 1
            milliseconds = (time.perf_counter() - start) * 1e3
            self.counters[f"{call.operation}.duration_ms"] += milliseconds  # type: ignore[assignment]
            with self._turn:
                self._ended = sequence
                self._turn.notify_all()
        return result


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
    return dict(_group_of(backend).counters)


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
            group, refused = _group_of(backend), Call(prepare.__name__)
            if not options.get("async_op"):
                return group.run(refused, fail)
            group.submit(refused, fail)
            raise
        return start()

    return call


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
    call = _call(backend, "all_reduce", array, dtype, op=op, route=route)
    flat = _writable(array)

    def work(player: Player) -> Array:
        window = Window(flat)
        player.play(_route_of(backend, call), window, window)
        _finish_mean(call, flat, backend.world_size)
        return _put_back(flat, array)

    return _perform(backend, call, work, timeout_seconds, async_op=async_op)


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
    call = _call(backend, "reduce", array, dtype, op=op, route=route, root=root)
    flat = _writable(array) if backend.rank == root else _flat_of(array)

    def work(player: Player) -> Array:
        own = _route_of(backend, call)
        is_root = backend.rank == root
        # Other ranks combine what passes through them, but their own array is theirs.
        has_adds = any(turn.adds for turn in own)
        window = Window(flat.copy() if has_adds and not is_root else flat)
        player.play(own, window, window)
        if is_root:
            _finish_mean(call, flat, backend.world_size)
        return _put_back(flat, array) if is_root else array

    return _perform(backend, call, work, timeout_seconds, async_op=async_op)


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
    call = _call(backend, "broadcast", array, dtype, route=route, root=root)
    flat = _writable(array)  # also of the root, whose parts come back in a ring

    def work(player: Player) -> Array:
        window = Window(flat)
        player.play(_route_of(backend, call), window, window)
        return _put_back(flat, array)

    return _perform(backend, call, work, timeout_seconds, async_op=async_op)


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
    call = _call(backend, "all_gather", whole, dtype, route=route)
    flat = whole.reshape(-1)

    def work(player: Player) -> Array:
        start = backend.rank * array.size
        own = flat[start : start + array.size]
        if not array.flags.c_contiguous or own.ctypes.data != array.ctypes.data:
            own[...] = array.reshape(-1)
        window = Window(flat)
        player.play(_route_of(backend, call), window, window)
        return whole

    return _perform(backend, call, work, timeout_seconds, async_op=async_op)


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
    call = _call(backend, "gather", array, dtype, route=route, root=root)._replace(elements=count)

    def work(player: Player) -> Array | None:
        start = backend.rank * flat.size
        if not is_root:
            window = Window(flat, start)
            player.play(_route_of(backend, call), window, window)
            return None
        whole = np.empty((backend.world_size, *array.shape), array.dtype)
        whole[root] = array
        window = Window(whole.reshape(-1))
        player.play(_route_of(backend, call), window, window)
        return whole

    return _perform(backend, call, work, timeout_seconds, async_op=async_op)


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
    call = _call(backend, "scatter", out, dtype, route=route, root=root)._replace(elements=count)
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
        player.play(_route_of(backend, call), source, window)
        if whole is not None:
            flat[...] = whole.reshape(-1)[start : start + flat.size]
        return _put_back(flat, out)

    return _perform(backend, call, work, timeout_seconds, async_op=async_op)


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
    call = _call(backend, "reduce_scatter", array, dtype, op=op, route=route)
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
        own_route = _route_of(backend, call)
        if len(own_route) <= 1:  # no partial sum passes through, so the input can stay
            player.play(own_route, Window(flat), Window(own, start))
        else:
            window = Window(flat.copy())
            player.play(own_route, window, window)
            own[...] = window.array[start : start + size]
        _finish_mean(call, own, backend.world_size)
        return part

    return _perform(backend, call, work, timeout_seconds, async_op=async_op)


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
    first = arrays[0]
    call = _call(backend, "all_to_all", first, dtype)
    call = call._replace(elements=0, route="" if out is None else "direct")
    if any(array.dtype != first.dtype for array in arrays):
        raise Unsupported("the arrays of an all-to-all differ in data type: convert them first")
    if out is not None and len(out) != backend.world_size:
        raise Unsupported(
            f"{len(out)} outputs do not fit {backend.world_size} ranks: pass one each"
        )
    for target in out or ():
        _check_out(target, target.size, first)
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

    return _perform(backend, call, work, timeout_seconds, async_op=async_op)


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

    return _perform(backend, Call("barrier"), work, timeout_seconds, async_op=async_op)


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
    call: Call,
    work: Callable[[Player], Result],
    timeout_seconds: float,
    *,
    async_op: bool,
) -> Callable[[], Result | Handle[Result]]:
    """Return what runs `work` in the order of the group, and ends it on all ranks if it fails."""
    group = _group_of(backend)
    combines = _COMBINES_BFLOAT16 if call.dtype == "bfloat16" else _COMBINES
    combine = combines.get(call.op, np.add)

    def run(sequence: int) -> Result:
        tag = Tag(sequence=sequence, call=call.code)
        deadline = Deadline(timeout_seconds, call.operation)
        player = Player(backend, tag, combine, deadline, group.scratch)
        try:
            with np.errstate(all="ignore"):  # overflow and NaN are results like any others
                if call.elements == 0 and call.operation not in {"barrier", "all_to_all"}:
                    _meet(player, backend)
                return work(player)
        except BaseException as error:
            # Also if another rank aborted it. A rank that waits for this one reads what comes from
            # here; what that other rank sent it may stand behind a message that nobody awaits.
            backend.abort(tag, str(error))
            raise

    group.counters[f"{call.operation}.bytes_processed"] += call.size_bytes
    return lambda: group.submit(call, run) if async_op else group.run(call, run)


def _meet(player: Player, backend: Backend) -> None:
    """Exchange empty messages: ranks whose arrays are not empty would otherwise wait."""
    peers = [peer for peer in range(backend.world_size) if peer != backend.rank]
    nothing = memoryview(bytearray())
    player.exchange([(peer, nothing) for peer in peers], [(peer, nothing) for peer in peers])


def _call(
    backend: Backend,
    operation: str,
    array: Array,
    dtype: str | None,
    *,
    op: str = "",
    route: str = "auto",
    root: int = 0,
) -> Call:
    """Check what a caller passed."""
    name = dtype or array.dtype.name
    stored_as = "uint16" if name == "bfloat16" else name
    if name not in DTYPES or not array.dtype.isnative or array.dtype.name != stored_as:
        raise Unsupported(
            f"arrays of {array.dtype.str} cannot be sent as {name}: use one of "
            f"{', '.join(DTYPES[1:])}; bfloat16 is uint16 with dtype='bfloat16'"
        )
    if op not in OPS:
        raise Unsupported(f"{operation} has no op {op!r}: use one of {', '.join(OPS[1:])}")
    if op == "mean" and "float" not in name:
        raise Unsupported(f"the mean of {name} is not {name}: use the sum and divide it")
    if not 0 <= root < backend.world_size:
        raise InvalidRank(root, backend.world_size)
    if route != "auto":
        check_route(operation, route)
    return Call(operation, op, name, "" if route == "auto" else route, root, array.size)


@lru_cache(maxsize=512)
def _planned(call: Call, rank: int, world_size: int, hosts: tuple[int, ...]) -> Route:
    """Return the route of a call; the arguments are few and repeat."""
    bounds = (0, *(stop for _, stop in ranges(call.elements, world_size)))
    problem = Problem(world_size=world_size, bounds=bounds, root=call.root, hosts=hosts)
    name = call.route or choose(call.operation, call.size_bytes, problem)
    return route_of(call.operation, name, rank, problem)


def _route_of(backend: Backend, call: Call) -> Route:
    return _planned(call, backend.rank, backend.world_size, backend.hosts)


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
    if flat.size and flat.ctypes.data != array.ctypes.data:
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


def _finish_mean(call: Call, array: Array, world_size: int) -> None:
    if call.op != "mean":
        return
    if call.dtype == "bfloat16":
        narrow(widen(array) / np.float32(world_size), array)
    else:
        np.divide(array, array.dtype.type(world_size), out=array)


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
    # One message even of nothing: the receiver may expect more, and would wait for it.
    for start in range(0, max(1, flat.nbytes), MESSAGE_BYTES):
        yield flat[start : start + MESSAGE_BYTES]
