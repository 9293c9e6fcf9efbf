"""All-reduce between processes of one host: against gloo, OpenMPI and a memcpy of the vector.

    python bench/reduction.py [world size ...]

The gradient lies in the slots already and the result is read in place, as in training. gloo takes
part if torch can be imported, OpenMPI if mpi4py can and `mpirun` is there. All take turns in the
same processes; a time is that of the slowest rank, and the median over the rounds is printed.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _peers
import numpy as np
from _peers import HAS_MPI, SIZES_BYTES, launch

from muster.collectives.errors import PeerRefused
from muster.collectives.reduction.arena_reducer import ArenaReducer
from muster.collectives.reduction.tree import Block
from muster.collectives.transports.arena import Arena, Geometry
from muster.collectives.transports.flags import Flags
from muster.collectives.transports.shared_memory import SharedMemoryBackend

WORLD_SIZES = (2, 4)
PEERS = ("gloo", "openmpi")
ROUNDS = 11
ROUND_BYTES = 8 << 20
"""A round repeats a short operation until this much was summed, or `MOST_REPEATS` times."""
MOST_REPEATS = 200


def start(world_size: int) -> int:
    """Run the ranks. They open this process's memory through /proc, as there is no agent here."""
    count = (world_size + 1) * (len(SIZES_BYTES) + 1)
    descriptors = [os.memfd_create("bench") for _ in range(count)]
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as directory:
        status = launch(__file__, [directory, *map(str, (os.getpid(), *descriptors))], world_size)
    for descriptor in descriptors:
        os.close(descriptor)
    return status


class Rank:
    """One process, with memory for what ranks say between rounds, and for each size."""

    def __init__(self, directory: Path, parent: int, descriptors: list[int]) -> None:
        self.rank, self.world_size = _peers.place()
        self._paths = iter([f"/proc/{parent}/fd/{number}" for number in descriptors])
        self.backend = SharedMemoryBackend(self.group(1)[0])
        self.backend.barrier()
        self.gloo = _peers.join_gloo(directory / "store", self.rank, self.world_size)
        self.mpi = None
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
        repeats = min(MOST_REPEATS, max(1, ROUND_BYTES // size_bytes))
        return _peers.measure(self.backend, self.contenders(size_bytes), ROUNDS, repeats)

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
    _peers.say_what_is_absent()
    status = 0
    for world_size in world_sizes or WORLD_SIZES:
        print(
            f"\nW = {world_size:4}{'muster, µs':>11}{'÷ memcpy':>10}{'gloo ÷':>10}{'OpenMPI ÷':>10}"
        )
        status = max(status, start(world_size))
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        parent, *descriptors = map(int, sys.argv[3:])
        Rank(Path(sys.argv[2]), parent, descriptors).run()
    else:
        sys.exit(main([int(size) for size in sys.argv[1:]]))
