"""How the ranks of a torch group meet: through the group's store, in shared memory or over TCP."""

import json
import os
import secrets
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

from muster.collectives.backend import Backend
from muster.collectives.errors import BackendUnavailable
from muster.collectives.simulated import SimulatedBackend
from muster.collectives.transports.arena import refuse_other_machines
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import is_loopback, rendezvous
from muster.collectives.transports.shared_memory import SharedMemoryBackend
from muster.collectives.transports.tcp import TcpBackend
from muster.host.processes import boot_id

LONGEST_PARENT: Final = 60

Store: TypeAlias = Any  # torch's


def connect(
    store: Store, rank: int, world_size: int, timeout: timedelta, *, host: str = ""
) -> Backend:
    """Return the backend once all ranks have met through their `store`.

    `host` is equal on ranks that can share memory, by default what `host_identity` says. Raises
    torch's `DistStoreError` if not all ranks come in time, and `CollectiveError`.
    """
    if world_size == 1:
        return SimulatedBackend.create_group(1)[0]
    # A store may outlive a group, whose successor has the same name: each has keys of its own.
    prefix = f"muster/{store.add(f'muster/joined/{rank}', 1)}"
    own = [host or host_identity() or f"rank {rank}", _address_towards(_store_host(store))]
    # A socket's path has at most 107 characters, and TMPDIR may be long.
    parent = None if len(tempfile.gettempdir()) < LONGEST_PARENT else "/tmp"  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="muster-", dir=parent) as private:  # 0700
        listener = None
        if rank == 0:
            keys = [f"{prefix}/{peer}" for peer in range(1, world_size)]
            store.wait(keys, timeout)
            others = [json.loads(store.get(key)) for key in keys]
            plan: dict[str, Any] = {"path": str(Path(private, "ranks"))}
            if any(other != own[0] for other, _ in others):
                address = _reachable(own[1], [other for _, other in others])
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.create_server((address, 0), family=family)
                port = listener.getsockname()[1]
                plan = {"address": address, "port": port, "token": secrets.token_hex()}
            store.set(f"{prefix}/0", json.dumps(plan))
        else:
            store.set(f"{prefix}/{rank}", json.dumps(own))
            store.wait([f"{prefix}/0"], timeout)
            plan = json.loads(store.get(f"{prefix}/0"))
        seconds = timeout.total_seconds()
        if "path" in plan:
            path = plan["path"]
            return SharedMemoryBackend.connect(path, rank, world_size, timeout_seconds=seconds)
    token = plan["token"].encode()
    member = Membership(rank=rank, world_size=world_size, generation=0, token=token)
    first = (plan["address"], plan["port"])
    connections = rendezvous(member, first, listener=listener, timeout_seconds=seconds)
    return TcpBackend(member, connections)


def host_identity() -> str:
    """Return what only processes that can share memory have in common; "" for a machine without.

    They meet at a path, so they need one view of the file system: containers may have their own.
    """
    try:
        refuse_other_machines()
        files = Path("/proc/self/ns/mnt").stat().st_ino
        return f"{boot_id()} {socket.gethostname()} {files} {os.getuid()}"
    except (BackendUnavailable, OSError):
        return ""


def _reachable(own: str, others: list[str]) -> str:
    """Return an address of this host that the others reach.

    On the store's own host the way to the store is loopback; that to a rank elsewhere is not.
    """
    ways = [own, *(_address_towards(other) for other in others if not is_loopback(other))]
    return next((way for way in ways if not is_loopback(way)), own)


def _address_towards(host: str) -> str:
    """Return this host's address on the way to another one."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)  # "discard": nothing is sent
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _store_host(store: Store) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", os.environ.get("MASTER_ADDR", "localhost")))
