"""Tells the coordinator that there is something to read, so that it need not ask all the time.

A nudge is an empty datagram to the address in the lease. It carries nothing and nobody waits for
it: rows are what counts, and a coordinator that misses it looks a moment later.
"""

import socket
from collections.abc import Callable
from contextlib import suppress

from store.errors import StoreError
from store.records import Lease


class Nudge:
    """Call it after a row was written."""

    def __init__(self, read_lease: Callable[[], Lease | None]) -> None:
        self._read_lease = read_lease

    def __call__(self) -> None:
        with suppress(OSError, StoreError, ValueError):
            lease = self._read_lease()
            if lease is not None:
                host, _, port = lease.address.rpartition(":")
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.sendto(b"", (host, int(port)))
