"""Is the process that holds the coordinator's lease alive?

On this host that is known for certain. Of another host only the beat is seen: a
coordinator whose beat stood still for as long as the lease lasts is taken to be gone. Time is
this process's own monotonic clock; wall clocks of two machines are never compared.
"""

import threading
from collections.abc import Callable

from muster.processes import is_provably_gone, is_running, stands_still
from store.leases import LEASE_SECONDS
from store.records import Lease


class CoordinatorWatch:
    """Remembers when a lease's beat was last seen to move. Safe to use from many threads."""

    def __init__(
        self,
        read_lease: Callable[[], Lease | None],
        monotonic: Callable[[], float],
    ) -> None:
        self._read_lease = read_lease
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._moved_at: float | None = None

    def absence(self) -> str | None:
        """Return None if a coordinator is there, else a sentence that says what is known."""
        lease = self._read_lease()
        if lease is None:
            return "no coordinator is running: start one with `make up`"
        if is_running(lease.process) and stands_still(lease.process.pid):
            return (
                f"the coordinator {lease.process.pid} stands still (SIGSTOP): `make up` ends it "
                f"soon; where that does not run, `kill -CONT {lease.process.pid}` lets it go on"
            )
        gone = is_provably_gone(lease.process)
        if is_running(lease.process) or (not gone and self._beats(lease)):
            return None
        return (
            f"the coordinator {lease.process.pid} on {lease.process.node} does not answer: "
            "start one with `make up`"
        )

    def _beats(self, lease: Lease) -> bool:
        with self._lock:
            now = self._monotonic()
            beat = (lease.epoch, lease.beat)
            if self._seen is not None and beat != self._seen:
                self._moved_at = now
            self._seen = beat
            return self._moved_at is not None and now - self._moved_at < LEASE_SECONDS
