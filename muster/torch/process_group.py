"""A process group of `torch.distributed` over Muster's collectives.

    import muster.torch  # registers it
    torch.distributed.init_process_group("muster")

The ranks of one host exchange data in shared memory, those of several hosts over TCP. Tensors on a
GPU go through the host. torch calls the methods by their names, of which some have changed: both
are there. Every error is torch's `DistBackendError`, whose cause is ours.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Self, TypeAlias, cast
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from muster.collectives.backend import Backend, Tag
from muster.collectives.engine import MESSAGE_BYTES
from muster.collectives.errors import CollectiveError, Unsupported
from muster.collectives.operations import (
    Op,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
)
from muster.torch.connect import connect

Tensor: TypeAlias = torch.Tensor
Options: TypeAlias = Any
"""What torch passes to an operation, `AllreduceOptions` and the like; None where it passes none."""

Work: TypeAlias = Callable[[float], object]
"""What an operation does; the argument is its timeout in seconds."""

_OPS: Final[Sequence[tuple[Any, Op]]] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
)
_COLLECTIVES: Final = None
_NONE: Final = torch.empty(0, dtype=torch.uint8)
"""Takes the place of a tensor for a rank that sends or receives nothing."""


class MusterWork(dist.Work):
    """One operation, under way or over."""

    def __init__(self, name: str, outputs: list[Tensor]) -> None:
        super().__init__()
        self._name = name
        self._outputs = outputs
        self._outcome: Future[None] = Future()

    def run(self, work: Callable[[], object]) -> None:
        """Do the work; `wait` raises what it raises."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  of the user's tensors, too
            failure = dist.DistBackendError(f"{self._name} failed: {error}")
            failure.__cause__ = error
            self._outcome.set_exception(failure)
        else:
            self._outcome.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True once the outputs are complete; raises `DistBackendError`."""
        seconds = timeout.total_seconds()
        try:
            self._outcome.result(seconds if seconds > 0 else None)
        except TimeoutError as error:
            raise dist.DistBackendError(
                f"{self._name} has not ended within {seconds:g} s: check the other ranks, or wait "
                "longer"
            ) from error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._outcome.done()

    def is_success(self) -> bool:
        return self._outcome.done() and self._outcome.exception() is None

    def exception(self) -> BaseException | None:
        return self._outcome.exception() if self._outcome.done() else None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> Any:  # noqa: ANN401  a future of torch
        """Return a future of the outputs."""
        devices = list({it.device for it in self._outputs if it.is_cuda})
        ended = torch.futures.Future(devices=devices)
        # What raises in `then` is an error for code in C++, such as DDP. With `set_exception` it
        # would take the exception for a result.
        outputs = ended.then(self._value)
        self._outcome.add_done_callback(lambda _: ended.set_result(None))
        return outputs

    def _value(self, _: object) -> list[Tensor]:
        self.wait()
        return self._outputs


class MusterProcessGroup(dist.ProcessGroup):
    """The ranks of one group of torch.

    Operations run in the order in which they are called, those with ``async_op`` in a thread.
    Messages between two ranks overlap with them and with each other.
    """

    def __init__(self, options: Options, backend: Backend) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.set_timeout(options.timeout)
        self._name: str = options.group_id
        self._backend = backend
        self._workers: defaultdict[object, _Worker] = defaultdict(_Worker)
        # Also at the end of the process, so that others see a rank that left, not one that died.
        self._close = finalize(self, _close, backend, self._workers)

    @classmethod
    def create(cls, options: Options, more: object = None) -> Self:  # noqa: ARG003
        """Return the group once all its ranks have met; torch calls this in `new_group`, too."""
        try:
            backend = connect(
                options.store, options.group_rank, options.group_size, options.timeout
            )
        except CollectiveError as error:
            raise dist.DistBackendError(
                f"the ranks of group {options.group_id} did not meet: {error}"
            ) from error
        return cls(options, backend)

    # Of the group

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "muster"

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Finish the collectives that were called, and close the connections."""
        self._workers[_COLLECTIVES].end()
        self._close()

    def abort(self) -> None:
        """Close the connections; operations that are under way fail."""
        self._close()

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> MusterWork:
        operands = self._operands(tensors)
        op = _op_of("all_reduce", opts)

        def work(seconds: float) -> None:
            for it in operands:
                array, dtype = it.numbers(op)
                all_reduce(self._backend, array, op, dtype=dtype, timeout_seconds=seconds)

        return self._perform("all_reduce", work, operands, operands, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Options = None) -> MusterWork:
        operands = self._operands(tensors)
        op, root = _op_of("reduce", opts), opts.rootRank

        def work(seconds: float) -> None:
            for it in operands:
                array, dtype = it.numbers(op)
                reduce(self._backend, array, op, root=root, dtype=dtype, timeout_seconds=seconds)

        return self._perform("reduce", work, operands, operands, opts)

    def broadcast(self, tensors: list[Tensor], opts: Options) -> MusterWork:
        operands = self._operands(tensors)

        def work(seconds: float) -> None:
            for it in operands:
                broadcast(self._backend, it.octets(), root=opts.rootRank, timeout_seconds=seconds)

        return self._perform("broadcast", work, operands, operands, opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> MusterWork:
        return self._exchange("all_gather", inputs * self.size(), outputs[0], opts)

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options
    ) -> MusterWork:
        sent = [_NONE] * self.size()
        sent[opts.rootRank] = inputs[0]
        return self._exchange("gather", sent, outputs[0] if outputs else [], opts)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options
    ) -> MusterWork:
        received = [_NONE] * self.size()
        received[opts.rootRank] = outputs[0]
        return self._exchange("scatter", inputs[0] if inputs else [], received, opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> MusterWork:
        return self._exchange("all_to_all", inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  torch's name
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Options = None,
    ) -> MusterWork:
        target, source = operands = self._operands([output, input])

        def work(seconds: float) -> None:
            all_to_all(
                self._backend,
                _split(source, input_split_sizes, self.size()),
                out=_split(target, output_split_sizes, self.size()),
                timeout_seconds=seconds,
            )

        return self._perform("all_to_all", work, operands, [target], opts)

    alltoall_base = all_to_all_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> MusterWork:
        targets, sources = self._operands(outputs), self._operands(inputs)

        def work(seconds: float) -> None:
            for target, source in zip(targets, sources, strict=True):
                all_gather(
                    self._backend, source.octets(), out=target.octets(), timeout_seconds=seconds
                )

        return self._perform("all_gather", work, [*targets, *sources], targets, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  torch's name
        opts: Options = None,
    ) -> MusterWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> MusterWork:
        targets, sources = self._operands(outputs), self._operands(inputs)
        op = _op_of("reduce_scatter", opts)

        def work(seconds: float) -> None:
            for target, source in zip(targets, sources, strict=True):
                (out, _), (array, dtype) = target.numbers(op), source.numbers(op)
                reduce_scatter(
                    self._backend, array, op, out=out, dtype=dtype, timeout_seconds=seconds
                )

        return self._perform("reduce_scatter", work, [*targets, *sources], targets, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  torch's name
        opts: Options = None,
    ) -> MusterWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None
    ) -> MusterWork:
        wholes = [torch.cat([it.reshape(-1) for it in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, wholes, opts)

    def barrier(self, opts: Options = None) -> MusterWork:
        def work(seconds: float) -> None:
            barrier(self._backend, timeout_seconds=seconds)

        return self._perform("barrier", work, [], [], opts)

    # Messages

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> MusterWork:
        operands = self._operands(tensors)

        def work(seconds: float) -> None:
            self._backend.exchange(
                [(peer, part) for it in operands for part in it.messages()],
                [],
                tag=_tag_of(tag),
                timeout_seconds=seconds,
            )

        return self._perform("send", work, operands, [], worker=("to", peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> MusterWork:
        operands = self._operands(tensors)

        def work(seconds: float) -> None:
            self._backend.exchange(
                [],
                [(peer, part) for it in operands for part in it.messages()],
                tag=_tag_of(tag),
                timeout_seconds=seconds,
            )

        return self._perform("recv", work, operands, operands, worker=("from", peer, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MusterWork:  # noqa: ARG002
        raise _unsupported("recv from any rank", "give the src")

    # How

    def is_staged(self, tensor: Tensor) -> bool:
        """Return whether a tensor goes through other memory, as that of a GPU does."""
        return not tensor.is_cpu

    def _operands(self, tensors: Sequence[Tensor]) -> "list[_Operand]":
        return [_Operand(tensor, is_staged=self.is_staged(tensor)) for tensor in tensors]

    def _exchange(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], opts: Options
    ) -> MusterWork:
        """Send ``inputs[r]`` to rank r, and fill ``outputs[r]`` with its answer; [] is none."""
        sources = self._operands(inputs or [_NONE] * self.size())
        targets = self._operands(outputs or [_NONE] * self.size())

        def work(seconds: float) -> None:
            all_to_all(
                self._backend,
                [it.octets() for it in sources],
                out=[it.octets() for it in targets],
                timeout_seconds=seconds,
            )

        return self._perform(name, work, [*sources, *targets], targets, opts)

    def _perform(
        self,
        name: str,
        work: Work,
        operands: "Sequence[_Operand]",
        outputs: "Sequence[_Operand]",
        opts: Options = None,
        *,
        worker: object = _COLLECTIVES,
    ) -> MusterWork:
        """Do the work in its turn. What is called without ``async_op`` needs no other thread."""
        own = opts.timeout.total_seconds() if opts is not None else 0.0
        seconds = own if own > 0 else self._timeout_seconds
        result = MusterWork(f"{name} in group {self._name}", [it.tensor for it in outputs])

        def run() -> None:
            for it in operands:
                it.wait_for_copy()
            work(seconds)
            for it in outputs:
                it.put_back()

        # Messages always go to a thread, and a release without the field does not say.
        in_background = worker is not _COLLECTIVES or getattr(opts, "asyncOp", True)
        self._workers[worker].run(partial(result.run, run), in_background=in_background)
        return result


class _Operand:
    """A tensor as contiguous host memory: its own, or a copy that is put back."""

    def __init__(self, tensor: Tensor, *, is_staged: bool) -> None:
        if tensor.layout is not torch.strided:
            raise _unsupported("a sparse tensor", "use dense gradients (sparse=False)")
        self.tensor = tensor.detach()
        self._copied: Any = None
        if is_staged:
            # Without a cache of ours: torch keeps pinned memory that is free for the next one.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            host.copy_(self.tensor, non_blocking=True)
            if tensor.is_cuda:
                # It also comes after what the user's stream still does with an output.
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(tensor.device))
        else:
            host = self.tensor.contiguous()
        self._flat = host.reshape(-1)

    def wait_for_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def octets(self) -> NDArray[np.uint8]:
        """Return the memory as bytes, for operations that only move them."""
        return cast("NDArray[np.uint8]", self._flat.view(torch.uint8).numpy())

    def messages(self) -> list[memoryview]:
        """Return the memory cut into messages; a tensor without elements is one, too."""
        octets = self.octets()
        if not octets.size:
            return [memoryview(bytearray())]
        starts = range(0, octets.size, MESSAGE_BYTES)
        return [octets[start : start + MESSAGE_BYTES].data for start in starts]

    def numbers(self, op: Op) -> tuple[NDArray[Any], str | None]:
        """Return the memory as numbers, and the name of a type that numpy does not have."""
        if self._flat.dtype is torch.bfloat16:
            return self._flat.view(torch.uint16).numpy(), "bfloat16"
        if self._flat.dtype is torch.bool:
            if op not in {"min", "max"}:
                raise Unsupported("bools have no sum: use MAX for or, MIN for and")
            return self.octets(), None
        return self._flat.numpy(), None

    def put_back(self) -> None:
        if self._flat.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self._flat.view(self.tensor.shape))


class _Worker:
    """Does jobs one after the other, in a thread where the caller does not wait for them."""

    # Not an executor: the end of the process would wait for operations whose peers never come.

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def run(self, job: Callable[[], None], *, in_background: bool) -> None:
        with self._lock:
            is_queued = not self._has_ended and (in_background or self._unfinished > 0)
            if is_queued:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name="muster-process-group", daemon=True
                    )
                    self._thread.start()
                self._unfinished += 1
                self._jobs.put(job)
        if not is_queued:
            job()

    def end(self, *, must_finish: bool = True) -> None:
        """Do no further job in the thread."""
        with self._lock:
            self._has_ended = True
        self._jobs.put(None)
        if must_finish and self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._unfinished -= 1


def _close(backend: Backend, workers: Mapping[object, _Worker]) -> None:
    for worker in workers.values():
        worker.end(must_finish=False)
    backend.close()


def _op_of(name: str, opts: Options) -> Op:
    """Return the reduction of an operation; raises `DistBackendError`."""
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for op, ours in _OPS:
        if wanted == op:
            return ours
    raise _unsupported(
        f"{name} with this ReduceOp",
        "use SUM, AVG, MIN or MAX, or all_gather and combine the tensors",
    )


def _unsupported(what: str, instead: str) -> Exception:
    error: Exception = dist.DistBackendError(f"muster does not support {what}: {instead}")
    error.__cause__ = Unsupported(str(error))
    return error


def _tag_of(tag: int) -> Tag:
    """Return ours; collectives have sequences, which keep them apart."""
    return Tag(context=tag & 0xFFFF_FFFF)


def _split(operand: _Operand, sizes: Sequence[int], parts: int) -> list[NDArray[np.uint8]]:
    """Cut the rows of a tensor into parts of these sizes, or equal ones."""
    octets = operand.octets()
    rows = len(operand.tensor)
    counts = sizes or [rows // parts] * parts
    if sum(counts) != rows or len(counts) != parts:
        raise Unsupported(
            f"{rows} rows are not {parts} parts of {list(counts)}: give split sizes that add up"
        )
    row_bytes = octets.size // rows if rows else 0
    return np.split(octets, np.cumsum(counts[:-1]) * row_bytes)
