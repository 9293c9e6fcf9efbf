"""The API's view of the coordinator: is it alive, and wake it up when there is work."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from database.errors import DatabaseError
from database.leases import LEASE_SECONDS
from database.records import Lease
from muster.host.processes import is_provably_gone, is_running, is_stopped

CACHED_SECONDS: Final = 1.0
"""How long the address of the coordinator is kept; a new coordinator reads all rows anyway."""


class CoordinatorWatch:
    """Tells whether the holder of the lease is alive. Thread-safe.

    On this host the process itself is looked at. On another host the lease's heartbeat must have
    moved within `LEASE_SECONDS` of this process's monotonic clock; the wall clocks of two machines
    are never compared.
    """

    def __init__(
        self, read_lease: Callable[[], Lease | None], monotonic: Callable[[], float]
    ) -> None:
        self._read_lease = read_lease
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._moved_at: float | None = None

    def absence(self) -> str | None:
        """Return why there is no working coordinator, or None if there is one."""
        lease = self._read_lease()
        if lease is None:
            return "no coordinator is running: start one with `muster up` (or `make up`)"
        process = lease.process
        if is_running(process):
            if not is_stopped(process.pid):
                return None
            return (
                f"the coordinator (pid {process.pid}) is stopped by a signal: continue it with "
                f"`kill -CONT {process.pid}`, or restart it with `muster up`"
            )
        if not is_provably_gone(process) and self._is_beating(lease):
            return None
        return (
            f"the coordinator (pid {process.pid} on {process.node}) does not respond: start one "
            "with `muster up` (or `make up`)"
        )

    def _is_beating(self, lease: Lease) -> bool:
        with self._lock:
            now = self._monotonic()
            beat = (lease.epoch, lease.beat)
            if self._seen is not None and beat != self._seen:
                self._moved_at = now
            self._seen = beat
            return self._moved_at is not None and now - self._moved_at < LEASE_SECONDS


class CoordinatorWaker:
    """Call it after writing a row for the coordinator, from any thread.

    It sends an empty datagram to the address in the lease. If that is lost, the coordinator finds
    the row at its next poll.
    """

    def __init__(
        self, read_lease: Callable[[], Lease | None], monotonic: Callable[[], float]
    ) -> None:
        self._read_lease = read_lease
        self._monotonic = monotonic
        self._cached: tuple[float, Lease | None] | None = None

    def __call__(self) -> None:
        with suppress(OSError, DatabaseError, ValueError):
            lease = self._lease()
            if lease is not None:
                host, _, port = lease.address.rpartition(":")
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.sendto(b"", (host, int(port)))

    def _lease(self) -> Lease | None:
        now, cached = self._monotonic(), self._cached
        if cached is not None and now - cached[0] < CACHED_SECONDS:
            return cached[1]
        lease = self._read_lease()
        self._cached = now, lease
        return lease
