"""Hooks of DDP that compress, torch's beside ours: ``python bench/compression_hooks.py [speed]``.

Two ranks over gloo on loopback. Accuracy: held-out digits that an MLP gets right after 400 steps at
one learning rate, three seeds. Speed: a step with 5 million parameters; all take turns, the slowest
rank counts, the median of the rounds is printed. Loopback is faster than any network, so that is
what a hook costs, not what it saves.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

ROUNDS = 7
SEEDS = 3
STEPS = 400
TRAINED = 1400
HOOKS: dict[str, Any] = {
    "no hook": None,
    "torch fp16": "fp16",
    "fp16": {256: "fp16"},
    "torch PowerSGD, rank 2": "power_sgd",
    "PowerSGD, rank 2": {256: {"kind": "power_sgd", "rank": 2}},
    "bf16": {256: "bf16"},
    "int8": {256: "int8"},
    "top 1 %, int8": {256: {"kind": "top_k", "ratio": 0.01, "values": "int8"}},
    "sign": {256: "sign"},
    "sign of 2 bits": {256: {"kind": "sign", "bits": 2}},
    "top 1 %": {256: {"kind": "top_k", "ratio": 0.01}},
    "top 1 % in 2 bits": {
        256: {"kind": "top_k", "ratio": 0.01, "values": {"kind": "sign", "bits": 2}}
    },
    "random 10 %": {256: {"kind": "random", "ratio": 0.1}},
    "PowerSGD, rank 4": {256: {"kind": "power_sgd", "rank": 4}},
}


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "IS_RANK": "1"}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | shared | {"RANK": rank})
        for rank in ("0", "1")
    ]
    sys.exit(max(rank.wait() for rank in ranks))


def run() -> None:
    import torch  # noqa: PLC0415  only in ranks
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if "speed" in sys.argv:
        steps = {name: step_of(hook) for name, hook in HOOKS.items()}
        found = measure({name: step for name, (step, _) in steps.items()})
        for name, seconds in found.items():
            show(f"{seconds * 1e3:8.1f} ms a step, {seconds / found['no hook']:5.2f}  {name}")
    else:
        steps = {}
        for name, hook in HOOKS.items():
            points = [accuracy_of(hook, seed, steps) for seed in range(SEEDS)]
            show(f"{statistics.mean(points):6.2f} ({min(points):.2f} to {max(points):.2f})  {name}")
    for _, state in steps.values():
        with state:
            pass
    dist.destroy_process_group()


def show(line: str) -> None:
    if os.environ["RANK"] == "0":
        print(line, flush=True)


def ddp(model: Any) -> Any:
    """Return DDP with one bucket: of several, torch's PowerSGD mixes up the operations."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    return DistributedDataParallel(model, bucket_cap_mb=100)


def compress(net: Any, hook: Any) -> Any:
    """Register a hook; return what has to be closed."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415
    from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415
        powerSGD_hook as power_sgd,
    )

    import muster.torch  # noqa: PLC0415

    if hook == "fp16":
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "power_sgd":
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
        state = power_sgd.PowerSGDState(None, **options, min_compression_rate=1)
        net.register_comm_hook(state, power_sgd.powerSGD_hook)
    elif hook is not None:
        state = muster.torch.CompressionState(hook)
        net.register_comm_hook(state, muster.torch.compression_hook)
        return closing(state)
    return nullcontext()


def accuracy_of(hook: Any, seed: int, states: dict[Any, Any]) -> float:
    import torch  # noqa: PLC0415
    from sklearn.datasets import load_digits  # noqa: PLC0415

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(seed)
    order = torch.randperm(len(labels))
    layers = [torch.nn.Linear(*sides) for sides in ((64, 256), (256, 256), (256, 10))]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    net = ddp(model)
    states[str(hook), seed] = net, compress(net, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 * seed + int(os.environ["RANK"]))
    for _ in range(STEPS):
        batch = order[:TRAINED][torch.randint(0, TRAINED, (32,))]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
    held_out = order[TRAINED:]
    right = model(images[held_out]).argmax(1) == labels[held_out]
    return 100 * right.float().mean().item()


def step_of(hook: Any) -> tuple[Callable[[], None], Any]:
    """Return a function that takes a step of DDP, and the state to close."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    hidden = (torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1600))
    model = torch.nn.Sequential(*hidden, torch.nn.ReLU(), torch.nn.Linear(1600, 10))
    net = ddp(model)
    state = compress(net, hook)
    samples, labels = torch.randn(16, 784), torch.randint(0, 10, (16,))

    def step() -> None:
        torch.nn.functional.cross_entropy(net(samples), labels).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step, state


def measure(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-3, ROUNDS):  # torch begins with PowerSGD after two steps
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number >= 0:
                times[name].append(seconds.item())
    return {name: statistics.median(them) for name, them in times.items()}


if __name__ == "__main__":
    run() if "IS_RANK" in os.environ else main()
