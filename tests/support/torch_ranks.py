"""Processes that are the ranks of a torch group, and what they do."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import muster.torch
from muster.collectives import all_gather, all_reduce, counters
from muster.collectives.compression.kinds import Compression
from muster.collectives.data_parallel import DataParallel
from muster.collectives.errors import ChannelClosed, SizeMismatch, Timeout
from muster.mesh import MeshBackend, PeerGone, discover
from muster.torch.distributed.connect import connect
from muster.torch.distributed.process_group import MusterProcessGroup, Options

PATIENCE_SECONDS = 60.0
"""A rank that says nothing for this long hangs."""

KILLED = "killed"
KEPT: list[object] = []
"""What uses gloo, and would hang at its end before the rank has answered."""

STEPS = 4
MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64)
ADDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8)

Rank = Callable[..., Any]


class StagedGroup(MusterProcessGroup):
    """Copies all tensors, as it does those of a GPU."""

    def is_staged(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        return True


class TcpGroup(MusterProcessGroup):
    """Takes every rank for one of another host."""

    @classmethod
    def create(cls, options: Options, more: object = None) -> "TcpGroup":  # noqa: ARG003
        rank, size = options.group_rank, options.group_size
        host = f"host {rank}"
        return cls(options, connect(options.store, rank, size, options.timeout, host=host))


for name, group in {"staged": StagedGroup, "tcp": TcpGroup}.items():
    dist.Backend.register_backend(name, group.create, extended_api=True, devices=["cpu"])


def run_ranks(rank: Rank, world_size: int, store: Path, *arguments: object) -> list[Any]:
    """Return what `rank` returns in each process; KILLED for one that killed itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # each rank of DDP would load it
    processes, pipes = [], []
    for number in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        words = (theirs, rank, number, world_size, str(store), arguments)
        processes.append(context.Process(target=_run, args=words, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    with ExitStack() as ending:
        for process in processes:
            ending.callback(process.join)
            ending.callback(process.kill)
        return [_answer(pipe) for pipe in pipes]


def _answer(pipe: Connection) -> object:
    if not wait([pipe], PATIENCE_SECONDS):
        raise TimeoutError("a rank hangs")
    try:
        answer = pipe.recv()
    except EOFError:
        return KILLED
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _run(
    pipe: Connection, rank: Rank, number: int, world_size: int, store: str, words: Sequence[object]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world_size), "STORE": store}
    try:
        answer = rank(*words)
    except Exception as error:  # noqa: BLE001  the test raises it
        answer = AssertionError(f"rank {number}: {error!r}")
    pipe.send(answer)


@cache
def store_of(path: str, world_size: int) -> dist.Store:
    """Return the store of all groups of this process; one that ends would remove the file."""
    return dist.FileStore(path, world_size)


@cache
def discovered(path: str) -> MeshBackend:
    """Return the group of the ranks as processes of a household of their own."""
    data_dir = Path(f"{path}-{os.environ['RANK']}")
    os.environ |= {"MUSTER_DATA_DIR": str(data_dir), "MUSTER_CLUSTER_KEY": path}
    return discover(int(os.environ["WORLD_SIZE"]) - 1, PATIENCE_SECONDS)


@contextmanager
def default_group(backend: str, timeout_seconds: float = PATIENCE_SECONDS) -> Iterator[int]:
    """Make the default group and destroy it; yield the rank."""
    world_size = int(os.environ["WORLD_SIZE"])
    if backend == "home":
        discovered(os.environ["STORE"])
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group("muster", init_method="muster://", timeout=timeout)
        yield dist.get_rank()
        dist.destroy_process_group()
        return
    dist.init_process_group(
        backend,
        store=store_of(os.environ["STORE"], world_size),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    yield dist.get_rank()
    if backend != "gloo":  # whose end hangs or aborts now and then
        dist.destroy_process_group()


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers whose sums are exact in every type."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 3) % 11).reshape(shape).to(dtype)


# Operations


def different_operations(backend: str) -> list[str]:
    """Return the operations whose results are not those of gloo."""
    with default_group("gloo") as rank:
        ours, theirs = dist.new_group(backend=backend), dist.new_group(backend="gloo")
        checks = {**_moves(rank), **_reductions(rank)}
        different = [
            name
            for name, operation in checks.items()
            if not _equal(operation(ours), operation(theirs))
        ]
        if not _equal(_averages(rank, ours), _averages_of_sums(rank, theirs)):
            different.append("avg")
        return different


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


Operation = Callable[[dist.ProcessGroup], list[torch.Tensor]]


def _moves(rank: int) -> dict[str, Operation]:  # noqa: C901  a table
    size = dist.get_world_size()
    root = size - 1

    def broadcast(dtype: torch.dtype, group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensor = values(rank, 5, 3, dtype=dtype)
        dist.broadcast(tensor, root, group=group)
        return [tensor]

    def all_gather_list(dtype: torch.dtype, group: dist.ProcessGroup) -> list[torch.Tensor]:
        parts = [torch.zeros(3, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, values(rank, 3, dtype=dtype), group=group)
        return parts

    def all_gather_whole(group: dist.ProcessGroup) -> list[torch.Tensor]:
        whole = torch.zeros(size * 2, 3)
        dist.all_gather_into_tensor(whole, values(rank, 2, 3), group=group)
        return [whole]

    def gather(group: dist.ProcessGroup) -> list[torch.Tensor]:
        parts = [torch.zeros(4) for _ in range(size)] if rank == root else []
        dist.gather(values(rank, 4), parts or None, dst=root, group=group)
        return parts

    def scatter(group: dist.ProcessGroup) -> list[torch.Tensor]:
        part = torch.zeros(4)
        parts = [values(it, 4) for it in range(size)] if rank == root else None
        dist.scatter(part, parts, src=root, group=group)
        return [part]

    def all_to_all_single(group: dist.ProcessGroup) -> list[torch.Tensor]:
        sent = [rank + peer for peer in range(size)]
        whole = torch.zeros(sum(sent), 2)  # this pattern is symmetric
        dist.all_to_all_single(whole, values(rank, sum(sent), 2), sent, sent, group=group)
        equal = torch.zeros(size * 2)
        dist.all_to_all_single(equal, values(rank, size * 2), group=group)
        return [whole, equal]

    def nothing(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensor = torch.zeros(0, 3)
        dist.all_reduce(tensor, group=group)
        dist.barrier(group=group)
        return [tensor]

    def objects(group: dist.ProcessGroup) -> list[torch.Tensor]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, {"rank": rank, "text": "x" * rank}, group=group)
        return [torch.tensor([it["rank"], len(it["text"])]) for it in found]

    def messages(group: dist.ProcessGroup) -> list[torch.Tensor]:
        received = [torch.full((size, 5), -1.0), torch.full((size, 1), -1.0)]
        works = []
        for peer in range(size):
            if peer != rank:
                works += [
                    dist.irecv(received[1][peer], peer, group=group, tag=1),
                    dist.irecv(received[0][peer], peer, group=group, tag=0),
                    dist.isend(values(rank, 5), peer, group=group, tag=0),
                    dist.isend(values(rank, 1), peer, group=group, tag=1),
                ]
        for work in works:
            work.wait()
        return received

    def messages_of_any(group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Those of another tag, which come first, must not be in the way."""
        peers = [it for it in range(size) if it != rank]
        works = [dist.isend(values(rank, 2), it, group=group, tag=9) for it in peers]
        works += [dist.isend(values(rank, 70_000), it, group=group) for it in peers]
        received, others = torch.zeros(size, 70_000), torch.zeros(size, 2)
        for _ in peers:
            tensor = torch.zeros(70_000)
            received[dist.recv(tensor, group=group)] = tensor
        for it in peers:
            dist.recv(others[it], it, group=group, tag=9)
        for work in works:
            work.wait()
        return [received, others]

    return {
        **{f"broadcast {dtype}": _with(broadcast, dtype) for dtype in MOVED},
        **{f"all_gather {dtype}": _with(all_gather_list, dtype) for dtype in MOVED},
        "all_gather_into_tensor": all_gather_whole,
        "gather": gather,
        "scatter": scatter,
        "all_to_all_single": all_to_all_single,
        "nothing": nothing,
        "objects": objects,
        "messages": messages,
        "messages of any rank": messages_of_any,
    }


def _with(
    operation: Callable[[torch.dtype, dist.ProcessGroup], list[torch.Tensor]], dtype: torch.dtype
) -> Operation:
    return lambda group: operation(dtype, group)


def _reductions(rank: int) -> dict[str, Operation]:  # noqa: C901  a table
    size = dist.get_world_size()

    def all_reduce_of(dtype: torch.dtype, group: dist.ProcessGroup) -> list[torch.Tensor]:
        results = []
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
        if not dtype.is_floating_point:
            ops += [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
        for op in ops:
            results.append(values(rank, 33, dtype=dtype))
            dist.all_reduce(results[-1], op, group=group)
        return results

    def asynchronous(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensors = [values(rank + it, 6, 4) for it in range(4)]
        works = [dist.all_reduce(it, group=group, async_op=True) for it in tensors]
        dist.all_reduce(tensors[0], group=group)  # comes after those in the background
        for work in works:
            work.wait()
        return tensors

    def reduce(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensor = values(rank, 9)
        dist.reduce(tensor, size - 1, group=group)
        return [tensor] if rank == size - 1 else []

    def large(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensor = values(rank, 700_001)
        dist.all_reduce(tensor, group=group)
        return [tensor]

    def complex_sum(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensor = values(rank, 4, dtype=torch.complex64) * (1 + 2j)
        dist.all_reduce(tensor, group=group)
        return [tensor]

    def scattered(group: dist.ProcessGroup) -> list[torch.Tensor]:
        part, of_list = torch.zeros(2, 3), torch.zeros(2, 3)
        whole = values(rank, size * 2, 3)
        dist.reduce_scatter_tensor(part, whole, group=group)
        dist.reduce_scatter(of_list, list(whole.chunk(size)), group=group)
        return [part, of_list]

    def sparse(group: dist.ProcessGroup) -> list[torch.Tensor]:
        places = torch.tensor([[rank, size, size], [0, 1, 1]])
        tensor = torch.sparse_coo_tensor(places, values(rank + 1, 3, 2), (size + 1, 2, 2))
        nothing = torch.sparse_coo_tensor(size=(size, 2))
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(nothing, group=group)
        return [tensor.to_dense(), nothing.to_dense()]

    def any_of_bools(group: dist.ProcessGroup) -> list[torch.Tensor]:
        flags = torch.tensor([rank == 0, False, True]).to(torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        return [flags]

    return {
        **{f"all_reduce {dtype}": _with(all_reduce_of, dtype) for dtype in ADDED},
        "all_reduce, async": asynchronous,
        "all_reduce, large": large,
        "all_reduce, complex": complex_sum,
        "all_reduce of flags": any_of_bools,
        "all_reduce, sparse": sparse,
        "reduce": reduce,
        "reduce_scatter": scattered,
    }


def _averages(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    tensor, part = values(rank, 9), torch.zeros(1)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    whole = values(rank, dist.get_world_size())
    dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, group=group)
    return [tensor, part]


def _averages_of_sums(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    tensor, whole = values(rank, 9), values(rank, dist.get_world_size())
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(whole, group=group)
    return [it / dist.get_world_size() for it in (tensor, whole[rank : rank + 1])]


def columns(backend: str) -> list[list[float]]:
    """Return a matrix of which some columns were added up, and one came from another rank."""
    with default_group(backend) as rank:
        whole = torch.full((2, 4), float(rank + 1))  # gloo takes the columns beside them, too
        dist.all_reduce(whole[:, 1:3])
        dist.broadcast(whole[:, 3], 1)
        return whole.tolist()


def messages_in_a_ring(backend: str) -> bool:
    """Send more than fits on the way to the next rank, each before it receives."""
    with default_group(backend) as rank:
        size = dist.get_world_size()
        sent, received = values(rank, 3_000_000), torch.zeros(3_000_000)
        work = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for it in dist.batch_isend_irecv(work):
            it.wait()
        return torch.equal(received, values((rank - 1) % size, 3_000_000))


def refused_calls(backend: str) -> list[str]:
    """Return the messages of calls that cannot be, after which others can."""
    with default_group(backend) as rank:
        refused = []
        for call in (
            lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
            lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX),
            lambda: dist.broadcast(torch.ones(3).to_sparse(), 0),
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool)),
            lambda: dist.broadcast(torch.ones(3 + rank), 0),
        ):
            try:
                call()
            except dist.DistBackendError as error:
                refused.append(str(error))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        return [*refused, str(tensor.tolist())]


def late_rank(backend: str) -> list[str]:
    """Return the error of a rank that waits for another one, and the sum of the call after it."""
    with default_group(backend) as rank:
        short = dist.new_group(timeout=timedelta(seconds=0.3))
        errors = []
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(1), group=short)
            except dist.DistBackendError as error:
                errors.append(type(error.__cause__).__name__)
        dist.barrier()  # now the other one comes
        if rank == 1:
            with suppress(dist.DistBackendError):  # what the first one sent may be enough
                dist.all_reduce(torch.ones(1), group=short)
        dist.barrier()
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=short)
        return [*errors, str(tensor.item())]


# Training


class Branches(torch.nn.Module):
    """A model of which a step uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(2))

    def forward(self, inputs: torch.Tensor, branches: Sequence[int]) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        return torch.cat([self.branches[branch](hidden) for branch in branches])


def trained(backend: str, kind: str) -> list[list[float]]:
    """Return the parameters after a few steps."""
    with default_group(backend) as rank:
        torch.manual_seed(0)
        model = Branches()
        net = model
        if kind == "ddp":
            net = DistributedDataParallel(model)
        elif kind == "unused":
            net = DistributedDataParallel(model, find_unused_parameters=True)
        elif kind == "accelerate":
            from accelerate import Accelerator  # noqa: PLC0415  takes seconds

            os.environ["MASTER_ADDR"] = "127.0.0.1"  # it asks, although the group is there
            net = Accelerator(cpu=True).prepare(model)
        else:
            shape = (2, 2) if kind == "hsdp" else (dist.get_world_size(),)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")[-len(shape) :])
            fully_shard(model.first, mesh=mesh)
            fully_shard(model, mesh=mesh)
        KEPT.append(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        for step in range(STEPS):
            branches = [step % 2] if kind == "unused" else [0, 1]
            net(torch.randn(4, 6), branches).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = [
            it.full_tensor() if hasattr(it, "full_tensor") else it for it in model.parameters()
        ]
        return [it.flatten().tolist() for it in whole]


def compressed(backend: str, compression: Compression, dtype: torch.dtype) -> dict[str, Any]:
    """Return losses, parameters and the ratio of DDP with our hook."""
    with default_group(backend) as rank:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 20)).to(dtype)
        net = DistributedDataParallel(model)
        KEPT.append(net)
        state = muster.torch.CompressionState(compression)
        net.register_comm_hook(state, muster.torch.compression_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        torch.manual_seed(rank)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            inputs = torch.randn(32, 20, dtype=dtype)
            loss = (net(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ratio = counters(state.backend).get("compression.ratio")
        state.close()
        found = [it.flatten().tolist() for it in model.parameters()]
        return {"losses": losses, "parameters": found, "ratio": ratio}


def hook_with_a_death(backend: str) -> str:
    """Return the error of a rank that survives while another one is killed in a step."""
    with default_group(backend) as rank:
        net = DistributedDataParallel(torch.nn.Linear(20, 20))
        KEPT.append(net)
        state = muster.torch.CompressionState("int8")
        KEPT.append(state)
        net.register_comm_hook(state, muster.torch.compression_hook)
        net(torch.ones(1, 20)).sum().backward()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            net(torch.ones(1, 20)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return "it went on"


def callbacks_that_wait(backend: str) -> list[float]:
    """Return the sum of sums that callbacks of callbacks waited for."""
    with default_group(backend):

        def add(depth: int, ended: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            (total,) = ended.value()
            if not depth:
                return total
            work = dist.all_reduce(total, async_op=True)
            return work.get_future().then(partial(add, depth - 1)).wait()

        work = dist.all_reduce(torch.ones(2), async_op=True)
        return work.get_future().then(partial(add, 4)).wait().tolist()


def uneven_batches(backend: str) -> list[float]:
    """Return the parameters after ranks with different numbers of batches joined."""
    with default_group(backend) as rank:
        torch.manual_seed(0)
        net = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        KEPT.append(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        with net.join(divide_by_initial_world_size=False):
            for step in range(2 + rank):
                optimizer.zero_grad()
                net(torch.full((1, 2), float(step + rank))).sum().backward()
                optimizer.step()
        return net.module.weight.flatten().tolist()


def profiled(backend: str) -> list[tuple[str, bool]]:
    """Return the events of operations, and whether they ended in another thread."""
    with default_group(backend), torch.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(2), async_op=True).wait()
        dist.barrier()
    return [(it.name, it.is_async) for it in profiler.events() if it.name.startswith(backend)]


def training_with_a_death(backend: str) -> str:
    """Return the error of a rank that survives while another one is killed in a step."""
    with default_group(backend) as rank:
        torch.manual_seed(0)
        net = DistributedDataParallel(torch.nn.Linear(1000, 1000))
        for step in range(STEPS):
            loss = net(torch.randn(2, 1000)).sum()
            if step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                loss.backward()
            except RuntimeError as error:
                return str(error)
        return "it went on"


def operation_with_a_death(backend: str, kind: str) -> str:
    """Return the cause of the error of each survivor."""
    with default_group(backend) as rank:
        tensor = torch.ones(4_000_000)
        if rank == 1:
            dist.barrier()
            if kind == "all_reduce":  # it begins, and cannot end without the others
                dist.all_reduce(tensor, async_op=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.barrier()
            match kind:
                case "all_reduce":
                    dist.all_reduce(tensor, async_op=True).wait()
                case "barrier":
                    dist.barrier()
                case "recv":
                    dist.recv(tensor, 1)
        except dist.DistBackendError as error:
            return type(error.__cause__).__name__
        return "it went on"


# Groups


def groups_of_some(backend: str) -> list[float]:
    """Return the sums in disjoint and overlapping groups of four ranks, and in the whole."""
    with default_group(backend) as rank:
        sums = []
        for ranks in ([0, 1], [2, 3], [0, 2, 3], [1, 2], [3]):
            group = dist.new_group(ranks)
            if rank in ranks:
                tensor = torch.tensor([10.0**rank])
                dist.all_reduce(tensor, group=group)
                sums.append(tensor.item())
        tensor = torch.tensor([10.0**rank])
        dist.all_reduce(tensor)
        return [*sums, tensor.item()]


def groups_one_after_the_other(backend: str) -> list[float]:
    sums = []
    for _ in range(3):
        with default_group(backend):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            sums.append(tensor.item())
            dist.barrier()
    return sums


def over_gloo() -> dict[str, Any]:
    """Return what our collectives give over a group of gloo."""
    with default_group("gloo") as rank:
        backend = muster.torch.TorchBackend()
        result: dict[str, Any] = {"hosts": backend.hosts, "cuda": backend.supports("cuda")}
        whole = values(rank, 1_000_001).numpy()
        result["sum"] = float(all_reduce(backend, whole)[5])
        result["gathered"] = all_gather(backend, values(rank, 2).numpy()).tolist()
        try:
            backend.recv((rank + 1) % 2, 4, timeout_seconds=0.05)
        except Timeout as error:
            result["timeout"] = error.seconds
        backend.barrier()
        backend.send((rank + 1) % 2, b"five!")
        try:
            backend.recv((rank + 1) % 2, 4)
        except SizeMismatch as error:
            result["sizes"] = (error.expected, error.got)
        result["message"] = bytes(backend.recv((rank + 1) % 2, 5))
        backend.barrier()
        second = muster.torch.TorchBackend()  # over the same group, while the first one is used
        second.send((rank + 1) % 2, b"second")
        backend.send((rank + 1) % 2, b"first")
        result["both"] = [
            bytes(it.recv((rank + 1) % 2, size)) for it, size in ((backend, 5), (second, 6))
        ]
        second.close()
        backend.close()
        return result


def death_over_gloo() -> str:
    """Return the error of our collectives when a rank of the group of gloo is killed."""
    dist.init_process_group(
        "gloo",
        store=store_of(os.environ["STORE"], 2),
        rank=int(os.environ["RANK"]),
        world_size=2,
    )
    backend = muster.torch.TorchBackend()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        all_reduce(backend, values(0, 100).numpy())
    except ChannelClosed as error:
        return f"rank {error.rank} is gone"
    return "it went on"


# Groups that were discovered


def at_home() -> dict[str, Any]:
    """Return what a process of a household sees, from before it has discovered a group."""
    seen: dict[str, Any] = {"refused": []}

    def refuse(**arguments: int) -> None:
        try:
            dist.init_process_group("muster", init_method="muster://", **arguments)
        except ValueError as error:
            seen["refused"].append(str(error))

    refuse()
    backend = discovered(os.environ["STORE"])
    refuse(rank=backend.rank, world_size=9)
    with default_group("home") as rank:
        seen["listening"] = [
            each.laddr.port == backend.mesh.network.port
            for each in psutil.Process().net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        ]
        seen["rank"] = rank == backend.rank
        tensor = torch.full((3,), float(rank))
        if rank == 0:
            seen["from"] = [dist.recv(torch.zeros(3)) for _ in range(backend.world_size - 1)]
        else:
            dist.send(tensor, 0)
    seen["store"] = _uses_of_a_store(backend.rank, backend.world_size)
    weights, gradient = torch.zeros(3, requires_grad=True), tensor
    parallel = DataParallel([weights], backend)
    parallel.ready(0, gradient)
    (averaged,) = parallel.finish()
    seen["average"] = averaged.tolist()
    return seen


def _uses_of_a_store(rank: int, size: int) -> list[Any]:
    """Return what the methods of a store give, and the errors of those that cannot be."""
    store, *_ = next(dist.rendezvous("muster://"))
    prefixed = dist.PrefixStore("prefix", store)
    added = prefixed.add("count", 1)
    prefixed.set(f"rank {rank}", bytes([255, rank]))
    others = [prefixed.get(f"rank {other}") for other in range(size)]
    prefixed.add("have read", 1)
    while prefixed.add("have read", 0) < size:
        pass
    results: list[Any] = [1 <= added <= size, others]
    if rank == size - 1:
        results += [
            prefixed.check(["count", "no such key"]),
            prefixed.compare_set("new", "", "first"),
            prefixed.compare_set("new", "else", "second"),
            prefixed.num_keys(),
            prefixed.delete_key("new"),
            prefixed.delete_key("new"),
        ]
        for call in (
            lambda: prefixed.wait(["no such key"], timedelta(seconds=0.1)),
            lambda: prefixed.add("rank 0", 1),
            lambda: prefixed.set("long", "x" * (1 << 20)),
        ):
            try:
                call()
            except dist.DistStoreError as error:
                results.append(str(error))
    prefixed.add("have done", 1)
    while prefixed.add("have done", 0) < size:  # rank 0 has the data
        pass
    return results


def met_anew() -> list[Any]:
    """Return what those see that go on when the last rank of three ends."""
    backend = discovered(os.environ["STORE"])
    with default_group("home") as rank:
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(1))
        except dist.DistBackendError as error:
            seen: list[Any] = [type(error.__cause__).__name__]
        try:
            next(dist.rendezvous("muster://"))
        except PeerGone as error:
            seen.append(type(error).__name__)
    new = discover(after=backend)
    with default_group("home"):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return [*seen, dist.get_world_size() == new.world_size, tensor.item()]
