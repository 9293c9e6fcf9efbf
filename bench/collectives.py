"""All-reduce over TCP, ours against gloo: ``python bench/collectives.py`` or ``make bench``.

Two processes on loopback, the repetitions of both interleaved; the time of the slower rank counts.
gloo comes with torch (``pip install torch``), which Muster has no need of: without it only our own
times are shown. Ours sums by the fixed tree, so its bits do not depend on the number of ranks.
"""

import importlib.util
import multiprocessing
import os
import random
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from muster.collectives.backend import Backend
from muster.collectives.handshake import Membership
from muster.collectives.message_reducer import MessageReducer
from muster.collectives.operations import all_gather_bytes
from muster.collectives.rendezvous import Address, rendezvous
from muster.collectives.tcp import TcpBackend
from muster.collectives.tree import assign_blocks

WORLD_SIZE: Final = 2
LEAVES: Final = 32
REPETITIONS: Final = {1 << 16: 400, 1 << 20: 100, 1 << 24: 21, 100 << 20: 9}
"""How often, by the size of the vector in bytes."""

WARM_UPS: Final = 3
GOAL: Final = 1.0

Reduce = Callable[[], object]


def main() -> int:
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # a port for gloo's own rendezvous
        address, port = listener.getsockname(), other.getsockname()[1]
        other.close()
        ranks = [
            context.Process(target=run, args=(0, address, port, listener)),
            context.Process(target=run, args=(1, address, port, None)),
        ]
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


def run(rank: int, address: Address, port: int, listener: socket.socket | None) -> None:
    own = Membership(rank=rank, world_size=WORLD_SIZE, generation=1, token=b"bench")
    backend = TcpBackend(own, rendezvous(own, address, listener=listener))
    gloo = gloo_of(rank, port)
    if rank == 0 and gloo is None:
        print("torch is not installed: nothing to compare with")
    for size_bytes, repetitions in REPETITIONS.items():
        kinds = {"ours": ours_of(backend, size_bytes)}
        if gloo is not None:
            kinds["gloo"] = gloo(size_bytes)
        times = measure(backend, kinds, repetitions)
        if rank == 0:
            show(size_bytes, times)
    backend.close()


def ours_of(backend: Backend, size_bytes: int) -> Reduce:
    reducer = MessageReducer(backend, np.zeros((1, size_bytes // 4), np.float32))
    reducer.slots[:] = 1
    dealt = assign_blocks([()] * WORLD_SIZE, LEAVES)
    return lambda: reducer.all_reduce(dealt)


def gloo_of(rank: int, port: int) -> Callable[[int], Reduce] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch  # noqa: PLC0415 - only where it is, and after the fork

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE
    )

    def reduce_of(size_bytes: int) -> Reduce:
        vector = torch.zeros(size_bytes // 4)
        return lambda: torch.distributed.all_reduce(vector)

    return reduce_of


def measure(backend: Backend, kinds: dict[str, Reduce], repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of each repetition, in an order by chance that both ranks share."""
    order = [kind for kind in kinds for _ in range(repetitions)]
    random.Random(0).shuffle(order)  # noqa: S311 - repeatable, not secret
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for reduce in kinds.values():
        for _ in range(WARM_UPS):
            reduce()
    for kind in order:
        backend.barrier()
        start = time.perf_counter()
        kinds[kind]()
        seconds = struct.pack("<d", time.perf_counter() - start)
        times[kind].append(
            max(struct.unpack("<d", own)[0] for own in all_gather_bytes(backend, seconds))
        )
    return times


def show(size_bytes: int, times: dict[str, list[float]]) -> None:
    medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    words = [f"{kind} {seconds * 1e3:9.3f} ms" for kind, seconds in medians.items()]
    if "gloo" in medians:
        words.append(f"{medians['gloo'] / medians['ours']:5.2f} x gloo (goal {GOAL:g})")
    print(f"{np.format_float_positional(size_bytes / 1024, trim='-'):>8} KB  {'   '.join(words)}")


if __name__ == "__main__":
    sys.exit(main())
