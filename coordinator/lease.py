"""Winning the coordinator's lease: one process holds it, the others wait.

A holder of this boot and pid namespace whose process is gone is replaced at once. Any other is
replaced when its heartbeat has not changed for the length of the lease on our own monotonic clock;
wall clocks are never compared. Time in which the database is away does not count, as no holder can
renew then.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from database.errors import DatabaseUnavailable, LeaseLost
from database.leases import LEASE_SECONDS, Leases
from database.records import Lease
from muster.contracts.rank import ProcessRecord
from muster.host.processes import is_provably_gone, is_running
from muster.runtime.stderr_messages import LastMessage

POLL_SECONDS: Final = 0.2

SLOW_READ_SECONDS: Final = 1.0
"""A database that takes this long to show the lease may have delayed the holder as well."""

_LOG: Final = structlog.get_logger("coordinator")


@dataclass(slots=True, kw_only=True)
class LeaseCandidate:
    """A process that wants to be the coordinator."""

    leases: Leases
    owner: str
    process: ProcessRecord
    address: str
    is_gone: Callable[[ProcessRecord], bool] = is_provably_gone
    clock: Callable[[], float] = time.monotonic
    first_epoch: int = field(init=False, default=0)
    """The least that the epoch of the lease may be."""
    displaced: Lease | None = field(init=False, default=None)
    """The lease from whose holder ours was taken; None if it was free."""
    may_wait: bool = field(init=False, default=True)
    """False to be cancelled instead of waiting for a live holder."""
    _seen: tuple[int, int] | None = field(init=False, default=None)
    _seen_at: float = field(init=False, default=0.0)
    _logged: LastMessage = field(init=False, default_factory=LastMessage)

    async def win(self) -> Lease:
        """Wait until the lease is ours, and return it."""
        while True:
            try:
                if (lease := await self._compete()) is not None:
                    return lease
            except DatabaseUnavailable as error:
                self._seen = None
                self._wait_for(str(error))
                await asyncio.sleep(POLL_SECONDS)

    async def _compete(self) -> Lease | None:
        """Take the lease, or wait a moment and return None."""
        began = self.clock()
        holder = await asyncio.to_thread(self.leases.current)
        if self.clock() - began >= SLOW_READ_SECONDS:
            self._seen = None
        if holder is None or self.may_replace(holder):
            try:
                take = partial(self.leases.take, displacing=holder, least_epoch=self.first_epoch)
                lease = await asyncio.to_thread(take, self.owner, self.process, self.address)
            except LeaseLost:
                return None  # another candidate was faster
            self.displaced = holder
            return lease
        self._wait_for(f"process {holder.process.pid} on {holder.process.node} coordinates")
        await wait_for_end(holder.process, POLL_SECONDS)
        return None

    def _wait_for(self, what: str) -> None:
        """Log once what we wait for. Raises CancelledError if we may not wait."""
        if not self.may_wait:
            raise asyncio.CancelledError
        if self._logged.is_new(what):
            _LOG.info(f"waiting: {what}", action="lease_awaited")

    def may_replace(self, holder: Lease) -> bool:
        """Return True if the holder is gone or has not renewed for the length of the lease.

        Also if it is ourselves: then the database went away before it confirmed our lease.
        """
        now = self.clock()
        if self._seen != (holder.epoch, holder.beat):
            self._seen, self._seen_at = (holder.epoch, holder.beat), now
        is_expired = now - self._seen_at >= LEASE_SECONDS
        return is_expired or holder.owner == self.owner or self.is_gone(holder.process)


async def wait_for_end(process: ProcessRecord, timeout_seconds: float) -> None:
    """Wait that long, or until the process ends if it is one of this machine."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # the pid is that of another machine, or gone
        await asyncio.sleep(timeout_seconds)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    if is_running(process):  # the pid was not reused before the descriptor was open
        loop.add_reader(pidfd, ended.set)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), timeout_seconds)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
