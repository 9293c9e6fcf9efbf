"""All-reduce between processes of one host: against gloo, OpenMPI and a memcpy of the vector.

    python bench/reduction.py [world size ...]

The gradient lies in the slots already and the result is read in place, as in training. gloo takes
part if torch can be imported, OpenMPI if mpi4py can and `mpirun` is there. All take turns in the
same processes; a time is that of the slowest rank, and the median over the rounds is printed.
"""

import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from muster.collectives.arena import Arena, Geometry
from muster.collectives.arena_reducer import ArenaReducer
from muster.collectives.errors import PeerRefused
from muster.collectives.flags import Flags
from muster.collectives.shared_memory import SharedMemoryBackend
from muster.collectives.tree import Block

SIZES_BYTES = {
    "4 KB": 4 << 10,
    "64 KB": 64 << 10,
    "1 MB": 1 << 20,
    "16 MB": 16 << 20,
    "100 MB": 100 << 20,
}
WORLD_SIZES = (2, 4)
PEERS = ("gloo", "openmpi")
ROUNDS = 11
ROUND_BYTES = 8 << 20
"""A round repeats a short operation until this much was summed, or `MOST_REPEATS` times."""
MOST_REPEATS = 200

HAS_GLOO = importlib.util.find_spec("torch") is not None
HAS_MPI = importlib.util.find_spec("mpi4py") is not None and shutil.which("mpirun") is not None


def start(world_size: int) -> int:
    """Run the ranks. They open this process's memory through /proc, as there is no agent here."""
    count = (world_size + 1) * (len(SIZES_BYTES) + 1)
    descriptors = [os.memfd_create("bench") for _ in range(count)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "rank", *map(str, (os.getpid(), port, *descriptors))]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if HAS_MPI:
        options = ["--oversubscribe", "--bind-to", "none", "-n", str(world_size)]
        as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        mpirun = shutil.which("mpirun") or "mpirun"
        command = [mpirun, *as_root, *options, *command]
        status = subprocess.run(command, env=environ, check=False).returncode
    else:
        ranks = [
            subprocess.Popen(
                command, env=environ | {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
            )
            for rank in range(world_size)
        ]
        status = max(rank.wait() for rank in ranks)
    for descriptor in descriptors:
        os.close(descriptor)
    return status


class Rank:
    """One process, with memory for what ranks say between rounds, and for each size."""

    def __init__(self, parent: int, port: int, descriptors: list[int]) -> None:
        environ = os.environ
        self.rank = int(environ.get("OMPI_COMM_WORLD_RANK") or environ["RANK"])
        self.world_size = int(environ.get("OMPI_COMM_WORLD_SIZE") or environ["WORLD_SIZE"])
        self._paths = iter([f"/proc/{parent}/fd/{number}" for number in descriptors])
        self.backend = SharedMemoryBackend(self.group(1)[0])
        self.backend.barrier()
        self.gloo = self.mpi = None
        if HAS_GLOO:
            import torch.distributed  # noqa: PLC0415  an optional peer

            torch.distributed.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=self.rank,
                world_size=self.world_size,
            )
            self.gloo = torch
        if HAS_MPI:
            from mpi4py import MPI  # noqa: PLC0415  an optional peer

            self.mpi = MPI

    def group(self, elements: int) -> tuple[Flags, int]:
        """Return this rank's part of a new group, and the descriptor of its result."""
        *memories, result = [
            os.open(next(self._paths), os.O_RDWR) for _ in range(self.world_size + 1)
        ]
        own = Arena.create(memories[self.rank], Geometry(slot_count=1, elements=elements))
        arenas = [own if rank == self.rank else peer(each) for rank, each in enumerate(memories)]
        flags = Flags(arenas=arenas, rank=self.rank, generation=1, on_wait=lambda: None)
        return flags, result

    def contenders(self, size_bytes: int) -> dict[str, Callable[[], object]]:
        elements = size_bytes // 4
        reducer = ArenaReducer(*self.group(elements))
        reducer.slots[0] = self.rank + 1
        dealt = [(Block(0, rank),) for rank in range(self.world_size)]
        source, target = np.ones(elements, np.float32), np.zeros(elements, np.float32)
        found: dict[str, Callable[[], object]] = {
            "muster": lambda: reducer.all_reduce(dealt),
            "memcpy": lambda: np.copyto(target, source),
        }
        if self.gloo is not None:
            tensor = self.gloo.zeros(elements)
            found["gloo"] = lambda: self.gloo.distributed.all_reduce(tensor)
        if self.mpi is not None:
            world = self.mpi.COMM_WORLD
            found["openmpi"] = lambda: world.Allreduce(source, target)
        return found

    def measure(self, size_bytes: int) -> dict[str, float]:
        """Return the median seconds of each, the slowest rank's of each round."""
        repeats = min(MOST_REPEATS, max(1, ROUND_BYTES // size_bytes))
        contenders = self.contenders(size_bytes)
        seconds = {name: np.zeros(ROUNDS) for name in contenders}
        order = list(contenders)
        for number in range(-1, ROUNDS):  # the first round warms up
            for name in order:
                self.backend.barrier()
                began = time.perf_counter()
                for _ in range(repeats):
                    contenders[name]()
                if number >= 0:
                    seconds[name][number] = (time.perf_counter() - began) / repeats
            order.append(order.pop(0))
        return {name: statistics.median(self.slowest(times)) for name, times in seconds.items()}

    def slowest(self, times: np.ndarray) -> list[float]:
        if self.rank:
            self.backend.send(0, times.tobytes())
            return list(times)
        for peer in range(1, self.world_size):
            other = np.frombuffer(self.backend.recv(peer, times.nbytes), times.dtype)
            times = np.maximum(times, other)
        return list(times)

    def run(self) -> None:
        for size, size_bytes in SIZES_BYTES.items():
            median = self.measure(size_bytes)
            if self.rank == 0:
                print(line(size, median), flush=True)
        self.backend.barrier()
        self.backend.close()
        if self.gloo is not None:
            self.gloo.distributed.destroy_process_group()


def peer(memory: int) -> Arena:
    """Attach a peer's arena; wait until the peer has created it."""
    while True:
        try:
            return Arena.attach(memory)
        except PeerRefused:
            time.sleep(0.001)


def line(size: str, median: dict[str, float]) -> str:
    ours = median["muster"]
    cells = [f"{size:8}", f"{ours * 1e6:11.1f}", f"{ours / median['memcpy']:10.2f}"]
    peers = (f"{median[peer] / ours:.2f}" if peer in median else "-" for peer in PEERS)
    return "".join([*cells, *(f"{cell:>10}" for cell in peers)])


def main(world_sizes: list[int]) -> int:
    for name, is_here in (("gloo (torch)", HAS_GLOO), ("OpenMPI (mpi4py)", HAS_MPI)):
        if not is_here:
            print(f"{name} is not installed: left out")
    status = 0
    for world_size in world_sizes or WORLD_SIZES:
        print(
            f"\nW = {world_size:4}{'muster, µs':>11}{'÷ memcpy':>10}{'gloo ÷':>10}{'OpenMPI ÷':>10}"
        )
        status = max(status, start(world_size))
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        parent, port, *descriptors = map(int, sys.argv[2:])
        Rank(parent, port, descriptors).run()
    else:
        sys.exit(main([int(size) for size in sys.argv[1:]]))
