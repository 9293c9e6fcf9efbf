"""Compressed sums of managed jobs between hosts at 100 Mbit/s and 1 Gbit/s, against whole ones.

    python bench/compression_hosts.py [kind ... | data_parallel]

The hosts are those of the tests; their links to a bridge are held to a rate in both directions. All
kinds take turns over the same connections. A group lies on one host, and its ranks share memory.
With ``data_parallel`` the same gradient is averaged by `DataParallel`, where ranks have no host.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

import _peers
import numpy as np
from _peers import ENVIRON, Call, duration, measure, ratio

from muster.collectives import DataParallel, TcpBackend
from muster.collectives.backend import Backend
from muster.collectives.reduction.compressed import KINDS
from muster.collectives.reduction.host_reducer import ArenaHostReducer
from muster.collectives.reduction.message_reducer import MessageReducer
from muster.collectives.reduction.tree import assign_blocks
from muster.collectives.transports.arena import Arena, Geometry
from muster.collectives.transports.flags import Flags
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import rendezvous
from tests.support.hosts import Host, address, hosts, refusal

BYTES: Final = 16 << 20
ELEMENTS: Final = BYTES // 4
TAIL: Final = 8
LEAVES: Final = 8
ROUNDS: Final = {"100mbit": 3, "1gbit": 9}
DATA_PARALLEL: Final = "data_parallel"
AVERAGED: Final = {
    "whole": None,
    "int8": "int8",
    "top 1 %": {"kind": "top_k", "ratio": 0.01},
    "top 1 % as int8": {"kind": "top_k", "ratio": 0.01, "values": "int8"},
}
GOALS: Final = {
    ("int8", "100mbit", 2): 0.30,
    ("int8", "100mbit", 3): 0.20,
    ("int8", "100mbit", 4): 0.33,
    **{("int8", "1gbit", count): 0.5 for count in (2, 3, 4)},
    **{("bf16", "100mbit", count): 0.58 for count in (2, 3, 4)},
}


def start(made: list[Host], directory: Path, per_host: int, rate: str, kinds: list[str]) -> int:
    """Run the ranks, those of a host beside each other."""
    store = f"{directory.name}-{rate}-{per_host}"
    command = [sys.executable, __file__, "rank", store, rate, str(len(made)), *kinds]
    variables = ENVIRON | {"WORLD_SIZE": str(per_host * len(made))}
    ranks = [
        host.start(command, variables | {"RANK": str(rank)}, output=sys.stdout.buffer)
        for rank, host in enumerate(host for host in made for _ in range(per_host))
    ]
    return max(abs(rank.wait(None)) for rank in ranks)


def be_rank(store: str, rate: str, host_count: int, kinds: list[str]) -> None:
    rank, world_size = _peers.place()
    own = Membership(rank=rank, world_size=world_size, generation=0, token=b"bench")
    backend = TcpBackend(own, rendezvous(own, (address(0), 29500)))
    places = [other * host_count // world_size for other in range(world_size)]
    backend.hosts = tuple(places)
    calls = averages(backend) if kinds == [DATA_PARALLEL] else sums(store, backend, kinds)
    taken = measure(backend, calls, ROUNDS[rate])
    if rank == 0:
        goals = {kind: GOALS.get((kind, rate, host_count)) for kind in kinds}
        cells = [
            f"{kind} {ratio(seconds / taken['whole'], most=goals.get(kind))}"
            for kind, seconds in taken.items()
            if kind != "whole"
        ]
        name = f"{rate}, {host_count} hosts of {world_size // host_count}"
        print(f"{name:24}{duration(taken['whole']):>12}   {',  '.join(cells)}", flush=True)
    backend.barrier()
    backend.close()


def averages(backend: Backend) -> dict[str, Call]:
    """Return steps of `DataParallel` with one matrix, by compression."""
    source = np.random.default_rng(backend.rank).standard_normal((2048, 2048), np.float32)

    def step_of(compression: object) -> Call:
        gradient = np.zeros_like(source)
        parallel = DataParallel([gradient], backend, compression=compression, timeout_seconds=600)

        def step() -> None:
            np.copyto(gradient, source)
            parallel.ready(0, gradient)
            parallel.finish()

        return step

    return {name: step_of(compression) for name, compression in AVERAGED.items()}


def sums(store: str, backend: Backend, kinds: list[str]) -> dict[str, Call]:
    """Return sums of managed jobs, by kind."""
    places = backend.hosts
    ends = [shared_ends(f"{store}-{kind}", backend) for kind in kinds]
    assignment = assign_blocks([()] * backend.world_size, LEAVES, LEAVES, places)
    whole = MessageReducer(backend, ends[0][0].own.slots)
    even = assign_blocks([()] * backend.world_size, LEAVES)
    calls: dict[str, Call] = {"whole": lambda: whole.all_reduce(even, timeout_seconds=600)}
    for kind, (flags, result) in zip(kinds, ends, strict=True):
        compression = KINDS[kind](LEAVES, LEAVES, ELEMENTS - TAIL, 0, 0.1)
        compression.begin(0)
        reducer = ArenaHostReducer(backend, flags, result, compression)
        calls[kind] = lambda it=reducer: it.all_reduce(assignment, timeout_seconds=600)
    return calls


def shared_ends(name: str, backend: Backend) -> tuple[Flags, int]:
    """Return this rank's flags with those of its host, and the descriptor of their result.

    Its own slots hold numbers. The memory of a host is its own, and goes with it.
    """
    made = f"/dev/shm/{name}"  # noqa: S108  of the host alone
    host = backend.hosts[backend.rank]
    peers = [rank for rank, place in enumerate(backend.hosts) if place == host]
    files = [os.open(f"{made}-{peer}", os.O_RDWR | os.O_CREAT) for peer in peers]
    geometry = Geometry(slot_count=LEAVES, elements=ELEMENTS, ring_bytes=4096)
    own = Arena.create(files[peers.index(backend.rank)], geometry)
    own.slots[:] = np.random.default_rng(backend.rank).standard_normal(ELEMENTS, np.float32)
    backend.barrier()
    arenas = [
        own if peer == backend.rank else Arena.attach(file)
        for peer, file in zip(peers, files, strict=True)
    ]
    flags = Flags(arenas=arenas, rank=peers.index(backend.rank), generation=1, on_wait=lambda: None)
    return flags, os.open(f"{made}-result", os.O_RDWR | os.O_CREAT)


def main(kinds: list[str]) -> int:
    if reason := refusal():
        print(f"left out: no hosts can be made here: {reason}")
        return 0
    status = 0
    print(f"{'16 MB':24}{'whole':>12}   ÷ whole", flush=True)
    for rate in ROUNDS:
        for count in (2, 3, 4):
            with (
                tempfile.TemporaryDirectory(prefix="muster-bench-") as directory,
                hosts(count, Path(directory), rate) as made,
            ):
                for per_host in (1, 2):
                    status = max(status, start(made, Path(directory), per_host, rate, kinds))
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_rank(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
    else:
        sys.exit(main(sys.argv[1:] or ["int8", "bf16", "random"]))
