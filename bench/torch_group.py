"""The process group "muster" against gloo: ``python bench/torch_group.py [RANKS ...]``.

All ranks have both groups. A round runs one and then the other, each some times in a row; the
slowest rank counts. Printed are the medians of the rounds, for an all-reduce and for a step of DDP
with 5 million parameters, and gloo's divided by ours.
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
REPETITIONS = {4 << 10: 100, 64 << 10: 50, 1 << 20: 20, 4 << 20: 10, 16 << 20: 4, 100 << 20: 1}
"""In a row, by the size in bytes."""

GOALS = {64 << 10: ">= 1.5", 1 << 20: ">= 2", 4 << 20: ">= 2", 16 << 20: ">= 2"}
STEPS = 5
ROUNDS = 15


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
        for number in range(ROUNDS):
            for kind in kinds if number % 2 else reversed(kinds):
                kinds[kind]()  # the ranks begin together
                start = time.perf_counter()
                for _ in range(repetitions):
                    kinds[kind]()
                seconds = torch.tensor((time.perf_counter() - start) / repetitions)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
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
