"""The process group "muster" against gloo: ``python bench/torch_group.py [RANKS ...]``.

All ranks have both groups. Every repetition runs one and then the other; the slowest rank counts.
Printed are the medians and gloo's divided by ours: all-reduce, and a step of DDP (5 M parameters).
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

RANKS = (2, 4)
REPETITIONS = {4 << 10: 400, 64 << 10: 300, 1 << 20: 100, 4 << 20: 50, 16 << 20: 25, 100 << 20: 9}
GOALS = {64 << 10: ">= 1.5", 1 << 20: ">= 2", 4 << 20: ">= 2", 16 << 20: ">= 2"}
STEPS = 40
WARM_UPS = 3


def main() -> None:
    for ranks in [int(word) for word in sys.argv[1:]] or RANKS:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        shared |= {"WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", "IS_RANK": "1"}
        started = [
            subprocess.Popen(
                [sys.executable, __file__], env=os.environ | shared | {"RANK": str(it)}
            )
            for it in range(ranks)
        ]
        for process in started:
            process.wait()


def run() -> None:
    import torch  # noqa: PLC0415  only in ranks
    import torch.distributed as dist  # noqa: PLC0415

    import muster.torch  # noqa: F401, PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"muster": dist.new_group(backend="muster"), "gloo": dist.new_group(backend="gloo")}

    def measure(kinds: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
        """Return the median seconds of each kind."""
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(-WARM_UPS, repetitions):
            for kind in kinds if number % 2 else reversed(kinds):
                dist.barrier()
                start = time.perf_counter()
                kinds[kind]()
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if number >= 0:
                    times[kind].append(seconds.item())
        return {kind: statistics.median(them) for kind, them in times.items()}

    def show(what: str, medians: dict[str, float], goal: str = "-") -> None:
        if dist.get_rank() == 0:
            words = "   ".join(f"{kind} {it * 1e3:8.3f} ms" for kind, it in medians.items())
            ratio = medians["gloo"] / medians["muster"]
            ranks = dist.get_world_size()
            print(f"{ranks} ranks, {what:18} {words}   {ratio:5.2f} x gloo ({goal})", flush=True)

    for size_bytes, repetitions in REPETITIONS.items():
        vector = torch.zeros(size_bytes // 4)
        kinds = {
            kind: partial(dist.all_reduce, vector, group=group) for kind, group in groups.items()
        }
        show(f"{size_bytes >> 10} KB", measure(kinds, repetitions), GOALS.get(size_bytes, "-"))
    steps = {kind: step_of(group) for kind, group in groups.items()}
    show("DDP, 5 M, a step", measure(steps, STEPS), ">= 1.11")
    dist.destroy_process_group()


def step_of(group: object) -> Callable[[], None]:
    """Return a function that takes a step of DDP over `group`."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    hidden = (torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1600))
    model = torch.nn.Sequential(*hidden, torch.nn.ReLU(), torch.nn.Linear(1600, 10))
    net = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    samples, labels = torch.randn(16, 784), torch.randint(0, 10, (16,))

    def step() -> None:
        torch.nn.functional.cross_entropy(net(samples), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    run() if "IS_RANK" in os.environ else main()
