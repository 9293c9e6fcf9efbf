"""Becoming the coordinator: one holds the lease, the others wait.

A holder that is provably dead (same machine, its process gone) is displaced at once. Any other is
displaced when its beat has stood still for the length of the lease on our own monotonic clock:
wall clocks are never compared. While the database is away, or nobody but a stranger can write,
nobody can renew anything, so that time does not count. One that was stopped in the middle of a
transaction keeps everybody else from the database; on this machine it is ended.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from coordinator.stopped_predecessor import end_if_stopped
from muster.contracts.process import ProcessRecord
from muster.processes import is_provably_gone, is_running
from store.errors import LeaseLost, StoreLocked, StoreUnavailable
from store.leases import COORDINATOR_LEASE, LEASE_SECONDS, Leases
from store.records import Lease

LOOK_SECONDS: Final = 0.2

LONG_LOOK_SECONDS: Final = 1.0
"""A database that needs this long to show the lease may have kept its holder waiting as well."""

DOUBT_SECONDS: Final = 3.0
"""A beat that has stood still for longer than any holder means to. It may be readable though nobody
can write, so from now on whoever looks waits for his turn to write; the rest of the lease is enough
for a holder who only waited for his."""

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
        self._holder: ProcessRecord | None = None
        """Who had the lease when it could be read last."""
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0
        self._told = ""

    async def win(self) -> Lease:
        """Wait until the lease is ours, and return it."""
        while True:
            try:
                lease = await self._compete()
            except StoreUnavailable as error:
                await self._be_without(error)
            else:
                if lease is not None:
                    return lease

    async def _compete(self) -> Lease | None:
        """Take the lease, or wait a moment and return None."""
        holder = await self._look()
        if holder is None or self.may_displace(holder):
            try:
                return await asyncio.to_thread(self._take, holder)
            except LeaseLost:
                return None  # somebody was faster; look again
        self._holder = holder.process
        self._be_patient(f"process {holder.process.pid} on {holder.process.node} coordinates")
        await end_of(holder.process, LOOK_SECONDS)
        return None

    async def _be_without(self, error: StoreUnavailable) -> None:
        """Wait a moment for a database that is away, unless it is locked and can be freed."""
        self._seen = None
        locked_by = self._holder if isinstance(error, StoreLocked) else None
        if locked_by is None or not end_if_stopped(locked_by):
            self._be_patient(str(error))
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> Lease | None:
        began = self._clock()
        doubts = self._seen is not None and began - self._seen_at >= DOUBT_SECONDS
        look = self._leases.current_among_writers if doubts else self._leases.current
        holder = await asyncio.to_thread(look, COORDINATOR_LEASE)
        if self._clock() - began >= LONG_LOOK_SECONDS:
            self._seen = None
        return holder

    def _be_patient(self, why: str) -> None:
        """Agree to wait, saying once what for, unless nobody wants that any more."""
        if not self.is_patient:
            raise asyncio.CancelledError
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


async def end_of(process: ProcessRecord, patience_seconds: float) -> None:
    """Sleep that long, or until a process of this machine ends: the kernel says so at once."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # another machine's, perhaps, whose pid means nothing here
        await asyncio.sleep(patience_seconds)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    if is_running(process):  # only now is it certain whom the descriptor holds
        loop.add_reader(pidfd, ended.set)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), patience_seconds)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
