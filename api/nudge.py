"""Tells the coordinator that there is something to read, so that it need not ask all the time.

A nudge is an empty datagram to the address in the lease. It carries nothing and nobody waits for
it: rows are what counts, and a coordinator that misses it looks a moment later. So the address is
remembered for a moment: reading it for each job of a flood costs more than a nudge is worth.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from store.errors import StoreError
from store.records import Lease

REMEMBERED_SECONDS: Final = 1.0
"""Whoever comes into office meanwhile reads all rows anyway."""


class Nudge:
    """Call it after a row was written, from any thread."""

    def __init__(
        self, read_lease: Callable[[], Lease | None], monotonic: Callable[[], float]
    ) -> None:
        self._read_lease = read_lease
        self._monotonic = monotonic
        self._known: tuple[float, Lease | None] | None = None

    def __call__(self) -> None:
        with suppress(OSError, StoreError, ValueError):
            lease = self._lease()
            if lease is not None:
                host, _, port = lease.address.rpartition(":")
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.sendto(b"", (host, int(port)))

    def _lease(self) -> Lease | None:
        now, known = self._monotonic(), self._known
        if known is not None and now - known[0] < REMEMBERED_SECONDS:
            return known[1]
        lease = self._read_lease()
        self._known = now, lease
        return lease
