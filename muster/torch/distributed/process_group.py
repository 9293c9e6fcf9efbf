"""A process group of `torch.distributed` over Muster's collectives.

    import muster.torch  # registers it
    torch.distributed.init_process_group("muster")

The ranks of one host exchange data in shared memory, those of several hosts over TCP. torch calls
the methods by name, and some names have changed: both are there. All errors are torch's
`DistBackendError`; where Muster raised one, it is the cause.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from itertools import chain
from typing import Any, Final, Self, TypeAlias
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from muster.collectives.backend import Backend, Tag
from muster.collectives.calls import Call, Op
from muster.collectives.deadline import Deadline
from muster.collectives.errors import CollectiveError
from muster.collectives.operation_queue import OperationQueue, fail_operation
from muster.collectives.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    messages_of,
    reduce,
    reduce_scatter,
)
from muster.torch.distributed.connect import connect
from muster.torch.distributed.store import view_of
from muster.torch.distributed.work import MusterWork, Operand, unsupported

Tensor: TypeAlias = torch.Tensor
Options: TypeAlias = Any
"""What torch passes to an operation, `AllreduceOptions` and the like; None where it has none."""

_OPS: Final[Sequence[tuple[Any, Op]]] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)
_COLLECTIVES: Final = "collectives"
_CALL: Final = Call("send")  # of counters that are not used
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)
"""Takes the place of a tensor for a rank that sends or receives none."""


_Method: TypeAlias = Callable[..., MusterWork]


def _counted(name: str) -> Callable[[_Method], _Method]:
    """Count a call that is refused, or this rank's next one would match the others' refused one."""

    def counted(method: _Method) -> _Method:
        @wraps(method)
        def call(group: "MusterProcessGroup", *arguments: object, **options: object) -> MusterWork:
            try:
                return method(group, *arguments, **options)
            except Exception as error:
                group.refuse(name, str(error))
                raise

        return call

    return counted


class MusterProcessGroup(dist.ProcessGroup):
    """The ranks of one group of torch.

    Collectives run in the order in which they are called, in a thread of the group if ``async_op``
    is set. Messages between two ranks overlap with them and with each other.
    """

    group_name: str = ""  # torch gives a group in Python no name, but asks for one
    group_desc: str = ""

    def __init__(self, options: Options, backend: Backend) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.set_timeout(options.timeout)
        self.group_name = self.group_desc = options.group_id
        self._backend = backend
        self._queues: defaultdict[object, OperationQueue] = defaultdict(OperationQueue)
        # Also at the end of the process: others then see a rank that left, not one that died. The
        # arguments hold no reference to the group, or it would never end before.
        self._close = finalize(self, _close, backend, self._queues)

    @classmethod
    def create(cls, options: Options, more: object = None) -> Self:  # noqa: ARG003
        """Return the group once all its ranks have met; torch calls this in `new_group`, too."""
        rank, world_size, timeout = options.group_rank, options.group_size, options.timeout
        try:
            found = view_of(options.store, options.global_ranks_in_group or range(world_size))
            return cls(options, found or connect(options.store, rank, world_size, timeout))
        except CollectiveError as error:
            raise dist.DistBackendError(
                f"the ranks of group {options.group_id} did not meet: {error}"
            ) from error

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "muster"

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Finish the collectives that were called, and close the connections."""
        if self._close.alive:
            self._queues[_COLLECTIVES].run(_CALL, lambda _: None)
            self._close()

    def abort(self) -> None:
        """Close the connections; operations that are under way fail."""
        self._close()

    def refuse(self, name: str, reason: str) -> None:
        """End a call on the other ranks whose arguments this rank does not take."""
        fail = partial(fail_operation, self._backend, name, reason)
        self._queues[_COLLECTIVES].submit(_CALL, lambda _: fail())

    # Collectives

    @_counted("all_reduce")
    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> MusterWork:
        if all(tensor.layout is torch.sparse_coo for tensor in tensors):
            if _op_of(opts, tensors) != "sum":
                raise unsupported("this ReduceOp of sparse tensors", "use SUM")
            calls = [partial(self._add_sparse, tensor) for tensor in tensors]
            return self._perform("all_reduce", calls, [], [], opts, outputs=tensors)
        op, operands = _op_of(opts, tensors), self._operands(tensors)
        run = partial(all_reduce, self._backend)
        calls = [partial(run, operand.numbers, op, dtype=operand.dtype) for operand in operands]
        return self._perform("all_reduce", calls, operands, operands, opts)

    allreduce_coalesced = allreduce

    @_counted("reduce")
    def reduce(self, tensors: list[Tensor], opts: Options) -> MusterWork:
        op, operands = _op_of(opts, tensors), self._operands(tensors)
        run = partial(reduce, self._backend, root=opts.rootRank)
        calls = [partial(run, operand.numbers, op, dtype=operand.dtype) for operand in operands]
        return self._perform("reduce", calls, operands, operands, opts)

    @_counted("broadcast")
    def broadcast(self, tensors: list[Tensor], opts: Options) -> MusterWork:
        operands = self._operands(tensors)
        run = partial(broadcast, self._backend, root=opts.rootRank)
        calls = [partial(run, operand.octets) for operand in operands]
        return self._perform("broadcast", calls, operands, operands, opts)

    @_counted("all_gather")
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> MusterWork:
        targets, sources = self._operands(outputs), self._operands(inputs)
        calls = [
            partial(all_gather, self._backend, source.octets, out=target.octets)
            for source, target in zip(sources, targets, strict=True)
        ]
        return self._perform("all_gather", calls, sources, targets, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Options = None) -> MusterWork:
        return self.all_gather_single_coalesced([output], [part], opts)

    _allgather_base = all_gather_single

    @_counted("reduce_scatter")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> MusterWork:
        op = _op_of(opts, inputs)
        targets, sources = self._operands(outputs), self._operands(inputs)
        run = partial(reduce_scatter, self._backend)
        calls = [
            partial(run, source.numbers, op, out=target.numbers, dtype=source.dtype)
            for source, target in zip(sources, targets, strict=True)
        ]
        return self._perform("reduce_scatter", calls, sources, targets, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(
        self, output: Tensor, whole: Tensor, opts: Options = None
    ) -> MusterWork:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None
    ) -> MusterWork:
        wholes = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, wholes, opts)

    def barrier(self, opts: Options = None) -> MusterWork:
        return self._perform("barrier", [partial(barrier, self._backend)], [], [], opts)

    # Collectives that only move parts: what each rank sends to each

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> MusterWork:
        return self._move("all_gather", outputs, [[part] * self.size() for part in inputs], opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> MusterWork:
        """Put tensor i of rank r into ``outputs[r][i]``."""
        if any(len(parts) != len(inputs) for parts in outputs):
            self.refuse("all_gather", "the lists of tensors have other lengths on another rank")
            raise unsupported("lists of different lengths", "pass a tensor for each one of a rank")
        of_each = [list(parts) for parts in zip(*outputs, strict=True)]
        return self._move("all_gather", of_each, [[part] * self.size() for part in inputs], opts)

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options
    ) -> MusterWork:
        sent = [_NOTHING] * self.size()
        sent[opts.rootRank] = inputs[0]
        received = outputs[0] if outputs else [_NOTHING] * self.size()
        return self._move("gather", [received], [sent], opts)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options
    ) -> MusterWork:
        received = [_NOTHING] * self.size()
        received[opts.rootRank] = outputs[0]
        sent = inputs[0] if inputs else [_NOTHING] * self.size()
        return self._move("scatter", [received], [sent], opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> MusterWork:
        return self._move("all_to_all", [outputs], [inputs], opts)

    @_counted("all_to_all")
    def _move(
        self,
        name: str,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Sequence[Tensor]],
        opts: Options,
    ) -> MusterWork:
        targets, sources = [*map(self._operands, outputs)], [*map(self._operands, inputs)]
        calls = [
            partial(
                all_to_all,
                self._backend,
                [operand.octets for operand in sent],
                out=[operand.octets for operand in received],
            )
            for sent, received in zip(sources, targets, strict=True)
        ]
        return self._perform(name, calls, [*chain(*sources)], [*chain(*targets)], opts)

    @_counted("all_to_all")
    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Options = None,
    ) -> MusterWork:
        (target,), (source,) = self._operands([output]), self._operands([whole])
        out = _split(target, output_split_sizes, self.size())
        parts = _split(source, input_split_sizes, self.size())
        call = partial(all_to_all, self._backend, parts, out=out)
        return self._perform("all_to_all", [call], [source], [target], opts)

    alltoall_base = all_to_all_single

    # Messages. Each peer, direction and tag has its own queue: none waits for another one.

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> MusterWork:
        operands = self._operands(tensors)
        parts = [(peer, part) for operand in operands for part in messages_of(operand.octets)]
        call = partial(self._backend.exchange, parts, [], tag=_tag_of(tag))
        return self._perform("send", [call], operands, [], queue=("to", peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> MusterWork:
        operands = self._operands(tensors)
        parts = [(peer, part) for operand in operands for part in messages_of(operand.octets)]
        call = partial(self._backend.exchange, [], parts, tag=_tag_of(tag))
        return self._perform("recv", [call], operands, operands, queue=("from", peer, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MusterWork:
        operands = self._operands(tensors)
        sources: list[int] = []

        def receive(timeout_seconds: float) -> None:
            deadline = Deadline(timeout_seconds, "a message of any rank")
            sources.append(self._backend.probe(_tag_of(tag), timeout_seconds=deadline.left_seconds))
            parts = [
                (sources[0], part) for operand in operands for part in messages_of(operand.octets)
            ]
            self._backend.exchange(
                [], parts, tag=_tag_of(tag), timeout_seconds=deadline.left_seconds
            )

        work = self._perform("recv", [receive], operands, operands, queue=("from any", tag))
        work.sources = sources
        return work

    # How

    def is_staged(self, tensor: Tensor) -> bool:
        """Return whether a tensor goes through other memory, as that of a GPU does."""
        return not tensor.is_cpu

    def _operands(self, tensors: Sequence[Tensor]) -> list[Operand]:
        return [Operand(tensor, is_staged=self.is_staged(tensor)) for tensor in tensors]

    def _perform(
        self,
        name: str,
        calls: Sequence[Callable[..., object]],
        sources: Sequence[Operand],
        targets: Sequence[Operand],
        opts: Options = None,
        *,
        queue: object = _COLLECTIVES,
        outputs: Sequence[Tensor] = (),
    ) -> MusterWork:
        """Make the calls in turn, in the calling thread if it waits for them anyway."""
        if not self._close.alive:
            raise dist.DistBackendError(
                f"{name} in group {self.group_name} came after its end: call "
                "destroy_process_group() last"
            )
        own = opts.timeout.total_seconds() if opts is not None else 0
        seconds = own if own > 0 else self._timeout_seconds
        outputs = [*outputs, *(target.tensor for target in targets)]
        work = MusterWork(name, self.group_name, outputs)

        def job() -> None:
            for operand in (*sources, *targets):
                operand.fetch()
            for call in calls:
                call(timeout_seconds=seconds)
            for target in targets:
                target.put_back()

        is_async = queue is not _COLLECTIVES or getattr(opts, "asyncOp", True)  # old: does not say
        put = self._queues[queue].submit if is_async else self._queues[queue].run
        put(_CALL, lambda _: work.run(job))
        return work

    def _add_sparse(self, tensor: Tensor, timeout_seconds: float) -> None:
        """Add the entries of all ranks; entries at the same place are added in one order."""
        own, axes = tensor.detach().cpu().coalesce(), tensor.sparse_dim()
        deadline = Deadline(timeout_seconds, "an all_reduce of sparse tensors")
        indices, values = (
            [
                torch.from_numpy(octets).view(part.dtype) if octets.size else part.new_empty(0)
                for octets in all_to_all(
                    self._backend,
                    [Operand(part.contiguous(), is_staged=False).octets] * self.size(),
                    timeout_seconds=deadline.left_seconds,
                )
            ]
            for part in (own.indices(), own.values())
        )
        dense = tensor.shape[axes:]
        total = torch.sparse_coo_tensor(
            torch.cat([part.view(axes, -1) for part in indices], dim=1),
            torch.cat([part.view(-1, *dense) for part in values]),
            tensor.shape,
        )
        with torch.no_grad():  # `detach` would leave the entries of the tensor itself as they are
            tensor.copy_(total.coalesce())


def _close(backend: Backend, queues: Mapping[object, OperationQueue]) -> None:
    for queue in queues.values():
        queue.end()
    backend.close()


def _op_of(opts: Options, tensors: Sequence[Tensor]) -> Op:
    """Return our name of a reduction; raises `DistBackendError`."""
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    name = next((name for op, name in _OPS if wanted == op), None)
    if name is None:
        raise unsupported("this ReduceOp", "all_gather the tensors and combine them")
    if name in {"sum", "mean", "product"} and any(tensor.dtype is torch.bool for tensor in tensors):
        raise unsupported(f"the {name} of bool", "use MAX for or, MIN for and")
    return name


def _tag_of(tag: int) -> Tag:
    """Return ours; only collectives have a sequence, which keeps them apart."""
    return Tag(context=tag & 0xFFFF_FFFF)


def _split(operand: Operand, sizes: Sequence[int], parts: int) -> list[NDArray[np.uint8]]:
    """Cut the rows of a tensor into parts of these sizes, or into equal ones."""
    octets, rows = operand.octets, len(operand.tensor)
    counts = sizes or [rows // parts] * parts
    if sum(counts) != rows or len(counts) != parts:
        raise unsupported(f"{rows} rows in {parts} parts of {counts}", "make the sizes add up")
    return np.split(octets, np.cumsum(counts[:-1]) * (octets.size // max(rows, 1)))
