"""The collective operations on one host, against gloo and OpenMPI.

    python bench/collectives.py [world size ...]

First over shared memory; then all-reduce over TCP on loopback, also against a bare exchange of the
same bytes over sockets of the same kind. A size is that of the largest buffer of a rank. A time is
that of the slowest rank, and the median over the rounds. gloo takes part if torch can be imported,
OpenMPI if mpi4py can and `mpirun` is there. "!" marks a goal that is missed.
"""

import select
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import _peers
import numpy as np
import xxhash
from _peers import HAS_MPI, SIZES_BYTES, Call, duration, launch, measure, ratio
from numpy.typing import NDArray

from muster.collectives import (
    SharedMemoryBackend,
    TcpBackend,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import rendezvous
from muster.collectives.transports.streams import CHUNK_BYTES, SocketStream

WORLD_SIZES: Final = (2, 4)
OPERATIONS: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")

ROUNDS: Final = 15
ROUND_BYTES: Final = 8 << 20
"""A round repeats a short operation until it moved this much, or `MOST_REPEATS` times."""
MOST_REPEATS: Final = 50

Array = NDArray[np.float32]


class Rank:
    """One process with all peers."""

    def __init__(self, directory: Path, ports: list[int]) -> None:
        self.rank, self.world_size = rank, world_size = _peers.place()
        self.shared = SharedMemoryBackend.connect(directory / "meeting", rank, world_size)
        self.tcp = TcpBackend.connect(f"127.0.0.1:{ports[0]}", rank, world_size)
        own = Membership(rank=rank, world_size=world_size, generation=0, token=b"")
        streams = rendezvous(own, ("127.0.0.1", ports[1])).streams
        self.bare = {
            peer: stream.socket
            for peer, stream in streams.items()
            if isinstance(stream, SocketStream)
        }
        self.gloo = _peers.join_gloo(directory / "store", rank, world_size)
        self.mpi: Any = None
        if HAS_MPI:
            from mpi4py import MPI  # noqa: PLC0415  an optional peer

            self.mpi = MPI

    def run(self) -> None:
        heading = f"{self.world_size} ranks, shared memory"
        self.say(f"\n{heading:28}{'Muster':>12}{'x gloo':>18}{'x OpenMPI':>18}")
        for operation in OPERATIONS:
            for size, size_bytes in SIZES_BYTES.items():
                taken = self.times(size_bytes, lambda a, b, it=operation: self.calls(it, a, b))
                ours = taken["muster"]
                over_gloo, over_mpi = goals(operation, size_bytes, self.world_size)
                cells = (
                    ratio(quotient(taken, "gloo", ours), least=over_gloo),
                    ratio(quotient(taken, "openmpi", ours), least=over_mpi),
                )
                self.show(f"{operation:16}{size}", ours, *cells)
        self.say(f"\n{'all_reduce over TCP':28}{'Muster':>12}{'x gloo':>18}{'÷ bare exchange':>18}")
        for size, size_bytes in SIZES_BYTES.items():
            taken = self.times(size_bytes, self.tcp_calls)
            ours = taken["muster"]
            most = 1.3 if size_bytes >= 1 << 20 else None
            cells = (
                ratio(quotient(taken, "gloo", ours), least=1),
                ratio(ours / taken["bare"], most=most),
            )
            self.show(size, ours, *cells)
        self.shared.barrier()
        for backend in (self.shared, self.tcp):
            backend.close()
        if self.gloo is not None:
            self.gloo.distributed.destroy_process_group()

    def times(self, size_bytes: int, calls_of: Any) -> dict[str, float]:
        elements = size_bytes // 4
        source, target = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
        calls: dict[str, Call] = calls_of(source, target)
        self.check(calls, source, target)
        repeats = min(MOST_REPEATS, max(1, ROUND_BYTES // size_bytes))
        return measure(self.shared, calls, ROUNDS, repeats)

    def check(self, calls: Mapping[str, Call], source: Array, target: Array) -> None:
        """Call each once, and see that all of them do the same."""
        results = set()
        for name, call in calls.items():
            source[:] = np.arange(source.size) % 7 + self.rank
            target[:] = 0
            call()
            if name != "bare":
                results.add(xxhash.xxh3_64_digest(source) + xxhash.xxh3_64_digest(target))
        assert len(results) == 1, f"{', '.join(calls)} have different results"
        source[:] = target[:] = 0  # sums of sums stay finite

    def calls(self, operation: str, source: Array, target: Array) -> dict[str, Call]:
        """Return one operation by each side, with the same arrays."""
        size, backend = self.world_size, self.shared
        parts, targets = np.split(source, size), np.split(target, size)
        part = parts[0]
        found: dict[str, Call] = {
            "muster": {
                "all_reduce": lambda: all_reduce(backend, source),
                "broadcast": lambda: broadcast(backend, source),
                "all_gather": lambda: all_gather(backend, part, out=target),
                "reduce_scatter": lambda: reduce_scatter(backend, source, out=targets[0]),
                "all_to_all": lambda: all_to_all(backend, parts, out=targets),
            }[operation]
        }
        if self.gloo is not None:
            gloo = self.gloo.distributed
            inward, outward = map(self.gloo.from_numpy, (source, target))
            first, own = map(self.gloo.from_numpy, (targets[0], part))
            found["gloo"] = {
                "all_reduce": lambda: gloo.all_reduce(inward),
                "broadcast": lambda: gloo.broadcast(inward, 0),
                "all_gather": lambda: gloo.all_gather_into_tensor(outward, own),
                "reduce_scatter": lambda: gloo.reduce_scatter_tensor(first, inward),
                "all_to_all": lambda: gloo.all_to_all_single(outward, inward),
            }[operation]
        if self.mpi is not None:
            world = self.mpi.COMM_WORLD
            found["openmpi"] = {
                "all_reduce": lambda: world.Allreduce(self.mpi.IN_PLACE, source),
                "broadcast": lambda: world.Bcast(source),
                "all_gather": lambda: world.Allgather(part, target),
                "reduce_scatter": lambda: world.Reduce_scatter_block(source, targets[0]),
                "all_to_all": lambda: world.Alltoall(source, target),
            }[operation]
        return found

    def tcp_calls(self, source: Array, target: Array) -> dict[str, Call]:
        found: dict[str, Call] = {"muster": lambda: all_reduce(self.tcp, source)}
        if self.gloo is not None:
            tensor = self.gloo.from_numpy(source)
            found["gloo"] = lambda: self.gloo.distributed.all_reduce(tensor)
        parts, targets = (
            [it.data.cast("B") for it in np.split(array, self.world_size)]
            for array in (source, target)
        )
        lanes = [
            lane
            for peer, it in self.bare.items()
            for lane in (
                Lane(it.send, parts[peer], it.fileno(), select.POLLOUT),
                Lane(it.recv_into, targets[peer], it.fileno(), select.POLLIN),
            )
        ]
        found["bare"] = lambda: exchange(lanes)
        return found

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def show(self, name: str, seconds: float, *cells: str) -> None:
        self.say(f"{name:28}{duration(seconds):>12}{''.join(f'{cell:>18}' for cell in cells)}")


def quotient(taken: Mapping[str, float], peer: str, ours: float) -> float | None:
    return taken[peer] / ours if peer in taken else None


def goals(operation: str, size_bytes: int, world_size: int) -> tuple[float | None, float | None]:
    """Return how many times as fast as gloo and OpenMPI an operation should be."""
    if operation == "all_reduce":
        if size_bytes >= 64 << 10:
            return 1, 1
        return None, 0.9 if world_size == 2 else None
    return (2, 1) if size_bytes >= 1 << 20 else (None, None)


@dataclass
class Lane:
    """One direction of a bare exchange with a peer: a part that is moved twice."""

    move: Callable[[memoryview], int]
    part: memoryview
    descriptor: int
    event: int
    moved: int = 0

    @property
    def is_done(self) -> bool:
        return self.moved == 2 * self.part.nbytes

    def advance(self) -> int:
        try:
            count = self.move(self.part[self.moved % self.part.nbytes :][:CHUNK_BYTES])
        except BlockingIOError:
            return 0
        self.moved += count
        return count


def exchange(lanes: list[Lane]) -> None:
    """Move what an all-reduce of n parts has to: twice a part to and from each peer."""
    for lane in lanes:
        lane.moved = 0
    while open_lanes := [lane for lane in lanes if not lane.is_done]:
        if not sum(lane.advance() for lane in open_lanes):
            events: dict[int, int] = {}
            for lane in open_lanes:
                events[lane.descriptor] = events.get(lane.descriptor, 0) | lane.event
            poll = select.poll()
            for descriptor, event in events.items():
                poll.register(descriptor, event)
            poll.poll()


def start(world_size: int) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="muster-bench-") as directory,
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = [str(listener.getsockname()[1]) for listener in (one, other)]
        one.close()
        other.close()
        return launch(__file__, [directory, *ports], world_size)


def main(world_sizes: list[int]) -> int:
    _peers.say_what_is_absent()
    return max(start(world_size) for world_size in world_sizes or WORLD_SIZES)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        Rank(Path(sys.argv[2]), [int(port) for port in sys.argv[3:]]).run()
    else:
        sys.exit(main([int(size) for size in sys.argv[1:]]))
