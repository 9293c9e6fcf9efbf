"""All-reduce between hosts at 1 Gbit/s, against gloo.

    python bench/hosts.py [route ...]

The hosts are those of the tests; their links to a bridge are held to 1 Gbit/s in both directions.
Sealed is what a `TcpBackend` between hosts always is; plain are the same connections without
encryption.
"""

import sys
import tempfile
from pathlib import Path
from typing import Final

import _peers
import numpy as np
from _peers import ENVIRON, Call, duration, measure, ratio

from muster.collectives import TcpBackend, all_reduce
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import Connections, rendezvous
from muster.collectives.transports.streams import SocketStream, Stream
from tests.support.hosts import Host, address, hosts, refusal

HOSTS: Final = 3
RATE: Final = "1gbit"
PORTS: Final = (29500, 29501)  # the hosts have no other processes
ROUNDS: Final = {"16 MB": 11, "100 MB": 5}


def start(made: list[Host], directory: Path, ranks_per_host: int, routes: list[str]) -> int:
    """Run the ranks, those of a host beside each other."""
    world_size = len(made) * ranks_per_host
    store = directory / str(world_size)
    store.mkdir()
    command = [sys.executable, __file__, "rank", str(store), *routes]
    ranks = [
        host.start(
            command,
            ENVIRON | {"WORLD_SIZE": str(world_size), "RANK": str(rank)},
            output=sys.stdout.buffer,
        )
        for rank, host in enumerate(host for host in made for _ in range(ranks_per_host))
    ]
    return max(abs(rank.wait(None)) for rank in ranks)


def be_rank(directory: Path, routes: list[str]) -> None:
    rank, world_size = _peers.place()
    own = Membership(rank=rank, world_size=world_size, generation=0, token=b"bench")
    sealed = TcpBackend(own, rendezvous(own, (address(0), PORTS[0])))
    plain = TcpBackend(own, plain_of(rendezvous(own, (address(0), PORTS[1]))))
    gloo = _peers.join_gloo(directory / "store", rank, world_size, "eth0")
    for size, rounds in ROUNDS.items():
        array = np.zeros(_peers.SIZES_BYTES[size] // 4, np.float32)
        calls: dict[str, Call] = {}
        for route in routes:
            calls[route] = lambda it=array, by=route: all_reduce(sealed, it, route=by)
            calls[f"{route}, plain"] = lambda it=array, by=route: all_reduce(plain, it, route=by)
        if gloo is not None:
            tensor = gloo.from_numpy(array)
            calls["gloo"] = lambda it=tensor: gloo.distributed.all_reduce(it)
        taken = measure(sealed, calls, rounds)
        if rank == 0:
            least = 1.15 if world_size > HOSTS else 0.95
            for route in routes:
                show(
                    f"{size:8}{route}",
                    taken[route],
                    taken[f"{route}, plain"],
                    taken.get("gloo"),
                    least,
                )
    sealed.barrier()
    for backend in (sealed, plain):
        backend.close()
    if gloo is not None:
        gloo.distributed.destroy_process_group()


def plain_of(connections: Connections) -> Connections:
    """Use the connections without the ciphers."""
    streams: dict[int, Stream] = {
        peer: SocketStream(stream.socket, peer)
        for peer, stream in connections.streams.items()
        if isinstance(stream, SocketStream)
    }
    return Connections(streams, connections.hosts)


def show(name: str, ours: float, plain: float, gloo: float | None, least: float) -> None:
    cells = (
        ratio(None if gloo is None else gloo / ours, least=least),
        ratio(ours / plain, most=1.03),
    )
    print(f"{name:28}{duration(ours):>12}{''.join(f'{cell:>18}' for cell in cells)}", flush=True)


def main(routes: list[str]) -> int:
    if reason := refusal():
        print(f"left out: no hosts can be made here: {reason}")
        return 0
    if not _peers.HAS_GLOO:
        print("gloo (torch) is not installed: left out")
    status = 0
    with (
        tempfile.TemporaryDirectory(prefix="muster-bench-") as directory,
        hosts(HOSTS, Path(directory), RATE) as made,
    ):
        for ranks_per_host in (1, 2):
            heading = f"{HOSTS} hosts, {ranks_per_host} rank(s) each"
            print(f"\n{heading:28}{'Muster':>12}{'x gloo':>18}{'÷ plain':>18}", flush=True)
            status = max(status, start(made, Path(directory), ranks_per_host, routes))
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_rank(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:] or ["auto"]))
