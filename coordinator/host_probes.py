"""Asks every host what it has, and keeps the answers in the database, where the API reads them."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from coordinator.launchers.launcher import NotStarted
from coordinator.launchers.remote import CommandLauncher
from database.errors import DatabaseUnavailable
from database.hosts import Hosts
from database.records import HostRecord, Lease, utc_now

REST_SECONDS: Final = 10.0  # between two probes, whatever happens
PERIOD_SECONDS: Final = 300.0
RETRY_SECONDS: Final = 60.0  # after a probe that failed; an agent that connects ends the pause


class HostProbes:
    """One task per host, from `start` to `stop`."""

    def __init__(
        self,
        launchers: Mapping[str, CommandLauncher],
        hosts: Hosts,
        lease: Lease,
        checkpoint_dir: Path | None = None,
    ) -> None:
        """`launchers` are those of all hosts by name, the coordinator's own included.

        `checkpoint_dir` is the directory of which each host is to prove that it shares it.
        """
        self._launchers = launchers
        self._hosts = hosts
        self._lease = lease
        self._checkpoint_dir = checkpoint_dir
        self._woken = {host: asyncio.Event() for host in launchers}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._keep_asking(host)) for host in self._launchers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_heard(self, host: str) -> None:
        """Ask a host again soon: an agent there has connected."""
        if host in self._woken:
            self._woken[host].set()

    async def _keep_asking(self, host: str) -> None:
        while True:
            record = HostRecord(host=host)
            with suppress(DatabaseUnavailable):
                known = await asyncio.to_thread(self._hosts.all)
                record = await self._ask(known.get(host, record))
                await asyncio.to_thread(self._hosts.write, record, self._lease)
            await asyncio.sleep(REST_SECONDS)
            has_failed = record.seen_at is None or record.problem is not None
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS if has_failed else PERIOD_SECONDS):
                    await self._woken[host].wait()
            self._woken[host].clear()

    async def _ask(self, known: HostRecord) -> HostRecord:
        try:
            probed = await self._launchers[known.host].probe(self._checkpoint_dir)
        except (NotStarted, OSError) as error:
            return replace(known, problem=str(error))
        return HostRecord(
            host=known.host,
            facts=probed.facts,
            seen_at=utc_now(),
            shared_dir=str(self._checkpoint_dir) if probed.is_shared else None,
        )
