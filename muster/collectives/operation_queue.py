"""Runs the operations of each group in the order in which they were called, and counts them.

An operation that fails on one rank, or is refused there, ends on all.
"""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, finalize

import numpy as np

from muster.collectives.backend import Backend, Tag
from muster.collectives.calls import Call
from muster.collectives.deadline import Deadline
from muster.collectives.engine import Executor, Scratch
from muster.collectives.errors import Timeout, Unsupported
from muster.collectives.planning.plans import Plan
from muster.collectives.routes import peers_after

Options = ParamSpec("Options")
Result = TypeVar("Result")

Outcome: TypeAlias = Any
"""The result of an operation, or a `Handle` of it if ``async_op`` is set."""


class Handle(Generic[Result]):
    """An operation that runs in the background."""

    def __init__(self) -> None:
        self._outcome: Future[Result] = Future()

    def done(self) -> bool:
        """Return True if it has ended, with a result or an error."""
        return self._outcome.done()

    def wait(self, timeout_seconds: float | None = None) -> Result:
        """Return the result once there is one, or raise the operation's error.

        Raises `Timeout` if it has not ended by then; it goes on.
        """
        try:
            return self._outcome.result(timeout_seconds)
        except TimeoutError:
            if timeout_seconds is None or self.done():
                return self._outcome.result()  # it ended just now, or this is its own error
            raise Timeout(timeout_seconds, "the end of an operation") from None

    result = wait

    def run(self, work: Callable[[], Result]) -> None:
        """Run the operation, in the thread of its group."""
        try:
            self._outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  `wait` raises it
            self._outcome.set_exception(error)


class OperationQueue:
    """What one backend's operations share: their order, their counters and scratch memory."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, _Counts] = defaultdict(_Counts)
        self.gauges: dict[str, float] = {}
        """Further counters, by their whole name."""
        self.scratch = Scratch()
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._issued = 0
        self._ended = 0
        self._given_up: set[int] = set()
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

    def _wait_for_turn(self, sequence: int) -> None:
        with self._lock:
            try:
                while self._ended != sequence - 1:
                    self._turn.wait()
            except BaseException:  # of a signal; the operations after this one go on
                if self._ended == sequence - 1:
                    self._end(sequence)
                else:
                    self._given_up.add(sequence)
                raise

    def _end(self, sequence: int) -> None:
        self._ended = sequence
        while self._ended + 1 in self._given_up:
            self._ended += 1
            self._given_up.remove(self._ended)
        if self._issued > self._ended:
            self._turn.notify_all()

    def _run_in_turn(self, call: Call, work: Callable[[int], Result], sequence: int) -> Result:
        if self._ended != sequence - 1:  # only the operation before this one can change it
            self._wait_for_turn(sequence)
        counts = self.counts[call.operation]
        start = time.perf_counter()
        try:
            with traced(call.operation, bytes=call.size_bytes):
                result = work(sequence)
            counts.completed += 1
        except BaseException:
            counts.failed += 1
            raise
        finally:
            counts.duration_ms += (time.perf_counter() - start) * 1e3
            counts.bytes_processed += call.size_bytes
            with self._lock:
                self._end(sequence)
        return result


def traced(name: str, **attributes: str | int) -> AbstractContextManager[object]:
    """Have the body be a span ``muster.name``, if the program has imported OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return nullcontext()
    given = {f"muster.{key}": value for key, value in attributes.items()}
    span = trace.get_tracer("muster").start_as_current_span(f"muster.{name}", attributes=given)
    return cast("AbstractContextManager[object]", span)


@dataclass(slots=True)
class _Counts:
    completed: int = 0
    failed: int = 0
    duration_ms: float = 0.0
    bytes_processed: int = 0


_queues: WeakKeyDictionary[Backend, OperationQueue] = WeakKeyDictionary()
_creating: Final = threading.Lock()


def queue_of(backend: Backend) -> OperationQueue:
    # A queue has no reference to its backend, or the weak key would live for ever. Jobs do, while
    # they are under way.
    queue = _queues.get(backend)
    if queue is None:
        with _creating:
            queue = _queues.setdefault(backend, OperationQueue())
        finalize(backend, queue.end)
    return queue


def counters(backend: Backend) -> dict[str, float]:
    """Return how often each operation completed and failed, how long it took and its bytes.

    Keys such as ``all_reduce.completed``, ``.failed``, ``.duration_ms`` and ``.bytes_processed``;
    those of the transport beside them, such as ``network.bytes_sent``; and, of `DataParallel`,
    ``compression.bytes_before``, ``.bytes_after``, ``.ratio``, ``.duration_ms`` and
    ``.residual_norm``.
    """
    queue = queue_of(backend)
    return (
        backend.counters()
        | {
            f"{operation}.{name}": value
            for operation, count in list(queue.counts.items())
            for name, value in asdict(count).items()
        }
        | queue.gauges
    )


def collective(
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


def perform(
    backend: Backend,
    plan: Plan,
    work: Callable[[Executor], Result],
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
        executor = Executor(backend, tag, plan.combine, deadline, queue.scratch)
        try:
            with np.errstate(all="ignore"):  # overflow and NaN are results like any others
                if plan.is_empty:
                    _exchange_nothing(executor, backend)
                return work(executor)
        except BaseException as error:
            # Also if another rank aborted it. A rank that waits for this one reads what comes from
            # here; what that other rank sent it may stand behind a message that no caller awaits.
            backend.abort(tag, str(error))
            raise

    return lambda: queue.submit(call, run) if async_op else queue.run(call, run)


def _exchange_nothing(executor: Executor, backend: Backend) -> None:
    """Exchange empty messages: ranks whose arrays are not empty would otherwise wait."""
    peers = peers_after(backend.rank, backend.world_size)
    messages = [(peer, memoryview(bytearray())) for peer in peers]
    executor.exchange(messages, list(messages))
