"""All-reduce between hosts at 1 Gbit/s, against gloo; as root.

    python bench/hosts.py [route ...]

A host is a network namespace, whose link to a bridge is held to 1 Gbit/s in both directions; the
bridge is in a namespace of its own, so nothing changes for other processes. Sealed is what a
`TcpBackend` between hosts always is; plain are the same connections without encryption.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import _peers
import numpy as np
from _peers import ENVIRON, Call, duration, measure, ratio

from muster.collectives import TcpBackend, all_reduce
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import Connections, rendezvous
from muster.collectives.transports.streams import SocketStream, Stream

HOSTS: Final = 3
RATE: Final = "tbf rate 1gbit burst 128kb latency 50ms"
PORTS: Final = (29500, 29501)  # the hosts have no other processes
ROUNDS: Final = {"16 MB": 11, "100 MB": 5}


def address(host: int) -> str:
    return f"10.0.0.{host + 1}"


@contextmanager
def hosts() -> Iterator[list[str]]:
    """Yield the names of the namespaces, which no longer exist afterwards."""
    switch = f"muster-{os.getpid()}"
    names = [f"{switch}-{host}" for host in range(HOSTS)]
    with ExitStack() as namespaces:
        for name in (switch, *names):
            ip("netns", "add", name)
            namespaces.callback(ip, "netns", "del", name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            port = f"port{host}"
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
            for namespace, link in ((name, "eth0"), (switch, port)):
                run("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", *RATE.split())
        yield names


def ip(*arguments: str) -> None:
    run("ip", *arguments)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def start(names: list[str], ranks_per_host: int, routes: list[str]) -> int:
    """Run the ranks, those of a host beside each other."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as directory:
        environ = ENVIRON | {"WORLD_SIZE": str(len(names) * ranks_per_host)}
        command = [sys.executable, __file__, "rank", directory, *routes]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],  # noqa: S607  wherever it is
                env=environ | {"RANK": str(host * ranks_per_host + place)},
            )
            for host, name in enumerate(names)
            for place in range(ranks_per_host)
        ]
        try:
            return max(abs(rank.wait()) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()


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
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("left out: network namespaces need root, and ip and tc of iproute2")
        return 0
    if not _peers.HAS_GLOO:
        print("gloo (torch) is not installed: left out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces have to be removed
    status = 0
    with ExitStack() as made:
        try:
            names = made.enter_context(hosts())
        except subprocess.CalledProcessError as error:
            print(f"left out: {' '.join(error.cmd)} failed: {error.stderr.strip()}")
            return 0
        for ranks_per_host in (1, 2):
            heading = f"{HOSTS} hosts, {ranks_per_host} rank(s) each"
            print(f"\n{heading:28}{'Muster':>12}{'x gloo':>18}{'÷ plain':>18}", flush=True)
            status = max(status, start(names, ranks_per_host, routes))
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_rank(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:] or ["auto"]))
