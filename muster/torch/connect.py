"""How the ranks of a torch group meet: through the group's store, in shared memory or over TCP."""

import json
import os
import secrets
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

from muster.collectives.arena import refuse_other_machines
from muster.collectives.backend import Backend
from muster.collectives.errors import BackendUnavailable
from muster.collectives.handshake import Membership
from muster.collectives.rendezvous import is_loopback, rendezvous
from muster.collectives.shared_memory import SharedMemoryBackend
from muster.collectives.simulated import SimulatedBackend
from muster.collectives.tcp import TcpBackend
from muster.host.processes import boot_id

Store: TypeAlias = Any  # torch's

DISCARD_PORT = 9
"""Nothing is sent there."""


def connect(
    store: Store, rank: int, world_size: int, timeout: timedelta, *, host: str = ""
) -> Backend:
    """Return the backend once all ranks have met through their `store`.

    `host` is equal on ranks that can share memory; by default it is found out. Raises
    `DistStoreError` of torch if not all ranks come in time, and `CollectiveError`.
    """
    if world_size == 1:
        return SimulatedBackend.create_group(1)[0]
    # A store may outlive a group, and its next one has the same name: each gets keys of its own.
    number = store.add(f"muster/joined/{rank}", 1)
    prefix = f"muster/{number}"
    own = [host or host_identity() or f"rank {rank}", _address_towards(_store_host(store))]
    if rank == 0:
        keys = [f"{prefix}/{peer}" for peer in range(1, world_size)]
        store.wait(keys, timeout)
        others = [json.loads(store.get(key)) for key in keys]
        seconds = timeout.total_seconds()
        if all(other == own[0] for other, _ in others):
            return _meet_here(store, f"{prefix}/0", world_size, seconds)
        addresses = [address for _, address in others]
        return _listen(store, f"{prefix}/0", world_size, _reachable(own[1], addresses), seconds)
    store.set(f"{prefix}/{rank}", json.dumps(own))
    store.wait([f"{prefix}/0"], timeout)
    plan = json.loads(store.get(f"{prefix}/0"))
    seconds = timeout.total_seconds()
    if "path" in plan:
        return SharedMemoryBackend.connect(plan["path"], rank, world_size, timeout_seconds=seconds)
    member = _member(rank, world_size, plan["token"])
    meeting = rendezvous(member, (plan["address"], plan["port"]), timeout_seconds=seconds)
    return TcpBackend(member, meeting)


def host_identity() -> str:
    """Return what only processes have in common that can share memory; nothing if they cannot."""
    try:
        refuse_other_machines()
        # The path where they meet has to be the same file: containers may share all but that.
        files = Path("/proc/self/ns/mnt").stat().st_ino
        return f"{boot_id()} {socket.gethostname()} {files} {os.getuid()}"
    except (BackendUnavailable, OSError):
        return ""


def _meet_here(store: Store, key: str, world_size: int, seconds: float) -> Backend:
    with tempfile.TemporaryDirectory(prefix="muster-") as directory:  # for this user alone
        path = str(Path(directory, "ranks"))
        store.set(key, json.dumps({"path": path}))
        return SharedMemoryBackend.connect(path, 0, world_size, timeout_seconds=seconds)


def _listen(store: Store, key: str, world_size: int, address: str, seconds: float) -> Backend:
    token = secrets.token_hex()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store.set(key, json.dumps({"address": address, "port": port, "token": token}))
    member = _member(0, world_size, token)
    meeting = rendezvous(member, (address, port), listener=listener, timeout_seconds=seconds)
    return TcpBackend(member, meeting)


def _member(rank: int, world_size: int, token: str) -> Membership:
    return Membership(rank=rank, world_size=world_size, generation=0, token=token.encode())


def _reachable(own: str, others: list[str]) -> str:
    """Return an address of this host that the others reach.

    On the store's own host the way to the store is loopback; the way to a rank elsewhere is not.
    """
    ways = [own, *(_address_towards(other) for other in others if not is_loopback(other))]
    return next((way for way in ways if not is_loopback(way)), own)


def _address_towards(host: str) -> str:
    """Return this host's address on the way to another one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, DISCARD_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # chooses a route, and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _store_host(store: Store) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", os.environ.get("MASTER_ADDR", "localhost")))
