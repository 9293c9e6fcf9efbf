"""
Is the process that holds the coordinator's lease alive?

On this host that is known for certain from /proc. Of another host only the beat is seen: a
coordinator whose beat stood still for as long as the lease lasts is taken to be gone. Time is
this process's own monotonic clock; wall clocks of two machines are never compared.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from store.records import Lease, ProcessRecord

LEASE_SECONDS: Final = 5.0
"""A beat that has not moved for this long is a coordinator that is gone (design: Lease)."""

_START_TICKS_FIELD: Final = 19
"""Where /proc/PID/stat has the start time, counted behind the command's closing bracket."""


class CoordinatorWatch:
    """Remembers when a lease's beat was last seen to move. Safe to use from many threads."""

    def __init__(
        self,
        read_lease: Callable[[], Lease | None],
        monotonic: Callable[[], float],
        proc: Path = Path("/proc"),
    ) -> None:
        self._read_lease = read_lease
        self._monotonic = monotonic
        self._proc = proc
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._moved_at: float | None = None

    def absence(self) -> str | None:
        """Return None if a coordinator is there, else a sentence that says what is known."""
        lease = self._read_lease()
        if lease is None:
            return "no coordinator is running: start one with `make up`"
        if is_alive(lease.process, self._proc) or self._beats(lease):
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


def is_alive(process: ProcessRecord, proc: Path = Path("/proc")) -> bool:
    """Return whether exactly this process runs on this host, and not another under its pid."""
    try:
        boot_id = (proc / "sys/kernel/random/boot_id").read_text().strip()
        stat = (proc / str(process.pid) / "stat").read_text()
    except OSError:
        return False
    # The command may hold blanks and brackets: what counts begins behind the last bracket.
    state, *fields = stat.rpartition(")")[2].split()
    start_ticks = int(fields[_START_TICKS_FIELD - 1])
    return (
        boot_id == process.boot_id
        and start_ticks == process.start_ticks
        and state not in {"Z", "X"}
    )
