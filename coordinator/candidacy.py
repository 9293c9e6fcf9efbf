"""Becoming the coordinator: one holds the lease, the others wait.

A holder that is provably dead (same machine, its process gone) is displaced at once. Any other is
displaced when its beat has stood still for the length of the lease on our own monotonic clock:
wall clocks are never compared. While the database is away nobody can renew anything, so that time
does not count.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from muster.contracts.process import ProcessRecord
from muster.processes import is_provably_gone
from store.errors import LeaseLost, StoreUnavailable
from store.leases import COORDINATOR_LEASE, LEASE_SECONDS, Leases
from store.records import Lease

LOOK_SECONDS: Final = 0.2

LONG_LOOK_SECONDS: Final = 1.0
"""A database that needs this long to show the lease may have kept its holder waiting as well."""

_LOG: Final = structlog.get_logger("coordinator")


class Candidate:
    """A process that wants to be the coordinator."""

    def __init__(
        self,
        leases: Leases,
        *,
        owner: str,
        process: ProcessRecord,
        address: str,
        is_gone: Callable[[ProcessRecord], bool] = is_provably_gone,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._owner = owner
        self._process = process
        self._address = address
        self._is_gone = is_gone
        self._clock = clock
        self.is_patient = True
        """Whether to wait for a holder that lives; who is not is cancelled instead."""
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0
        self._told = ""

    async def win(self) -> Lease:
        """Wait until the lease is ours, and return it."""
        while True:
            try:
                holder = await self._look()
                if holder is None or self.may_displace(holder):
                    return await asyncio.to_thread(self._take, holder)
                why = f"process {holder.process.pid} on {holder.process.node} coordinates"
            except LeaseLost:
                continue  # somebody was faster; look again
            except StoreUnavailable as error:
                self._seen = None
                why = str(error)
            if not self.is_patient:
                raise asyncio.CancelledError
            self._tell(why)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> Lease | None:
        began = self._clock()
        holder = await asyncio.to_thread(self._leases.current, COORDINATOR_LEASE)
        if self._clock() - began >= LONG_LOOK_SECONDS:
            self._seen = None
        return holder

    def _tell(self, why: str) -> None:
        if why != self._told:
            self._told = why
            _LOG.info(f"waiting: {why}", action="lease_awaited")

    def may_displace(self, holder: Lease) -> bool:
        """Return whether the holder is dead, or has not renewed for the length of the lease.

        Or is ourselves: then it was taken, and the database went away before it said so.
        """
        now = self._clock()
        if self._seen != (holder.epoch, holder.beat):
            self._seen, self._seen_at = (holder.epoch, holder.beat), now
        stands_still = now - self._seen_at >= LEASE_SECONDS
        return stands_still or holder.owner == self._owner or self._is_gone(holder.process)

    def _take(self, holder: Lease | None) -> Lease:
        return self._leases.take(
            COORDINATOR_LEASE, self._owner, self._process, self._address, displacing=holder
        )
