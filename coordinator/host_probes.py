"""Asks every host for its facts, and keeps them in the database, where the API reads them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import structlog

from coordinator.launchers.launcher import NotStarted
from coordinator.launchers.remote import CommandLauncher
from coordinator.launchers.scheduler import LIST_SECONDS, SchedulerProbe
from database.errors import DatabaseUnavailable, LeaseLost
from database.hosts import Hosts
from database.records import HostRecord, Job, Lease, utc_now
from muster.contracts.job.status import JobUid
from muster.contracts.settings.paths import DataDir
from muster.contracts.views.service import EngineSweep

MIN_INTERVAL_SECONDS: Final = 10.0
INTERVAL_SECONDS: Final = 300.0
RETRY_SECONDS: Final = 60.0  # after a probe that failed; an agent that connects ends the pause

Prober: TypeAlias = CommandLauncher | SchedulerProbe  # a host, or a scheduler

_LOG: Final = structlog.get_logger("coordinator")


class HostProbes:
    """One task per host, from `start` to `stop`."""

    def __init__(
        self,
        launchers: Mapping[str, Prober],
        hosts: Hosts,
        lease: Lease,
        jobs: Callable[[Sequence[JobUid]], Mapping[JobUid, Job]],
        data: DataDir,
        checkpoint_dir: Path | None = None,
    ) -> None:
        """`launchers` are those of all hosts by name, the coordinator's own included.

        `jobs` finds those with a uid; `data` is where their logs lie here. `checkpoint_dir` is
        the directory of which each host is to prove that it shares it.
        """
        self._launchers = launchers
        self._hosts = hosts
        self._lease = lease
        self._jobs = jobs
        self._data = data
        self._checkpoint_dir = checkpoint_dir
        self._woken = {host: asyncio.Event() for host in launchers}
        self.refusals: dict[str, str] = {}
        """By host, why no agent can be started there."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._probe(host)) for host in self._launchers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def probe_soon(self, host: str) -> None:
        """Probe a host again soon: an agent there has connected, or was lost."""
        if host in self._woken:
            self._woken[host].set()

    async def _probe(self, host: str) -> None:
        """Probe a host again and again, until our lease is lost."""
        while True:
            record = HostRecord(host=host)
            try:
                record, uids = await self._ask(await asyncio.to_thread(self._hosts.find, host))
                await asyncio.to_thread(self._hosts.write, record, self._lease)
                await self._fetch_logs(host, uids)
            except DatabaseUnavailable:
                pass
            except LeaseLost:
                return
            except Exception:  # noqa: BLE001  of one host alone: no job depends on it
                _LOG.exception("cannot probe a host", action="not_probed", host=host)
            is_scheduler = isinstance(self._launchers[host], SchedulerProbe)
            await asyncio.sleep(LIST_SECONDS if is_scheduler else MIN_INTERVAL_SECONDS)
            has_failed = record.seen_at is None or record.problem is not None
            with suppress(TimeoutError, DatabaseUnavailable):
                async with asyncio.timeout(RETRY_SECONDS if has_failed else INTERVAL_SECONDS):
                    await self._wait(host)
            self._woken[host].clear()

    async def _wait(self, host: str) -> None:
        """Wait until a host has changed, or a sweep of a scheduler was requested."""
        if not isinstance(self._launchers[host], SchedulerProbe):
            await self._woken[host].wait()
            return
        while not (await asyncio.to_thread(self._hosts.find, host)).is_sweep_due:  # noqa: ASYNC110
            await asyncio.sleep(LIST_SECONDS)

    async def _ask(self, known: HostRecord) -> tuple[HostRecord, Sequence[str]]:
        """Return what a host says, and the uids of the jobs that have a directory there."""
        launcher, directory = self._launchers[known.host], self._checkpoint_dir
        request = known.sweep_request or EngineSweep(number=0, cancel=[])
        # What was answered once is never cancelled later.
        due = request.cancel if known.is_sweep_due else []
        sweep = known.sweep
        try:
            if isinstance(launcher, SchedulerProbe):
                sweep = request
                probed = await launcher.probe(directory)
                sweep = msgspec.structs.replace(request, leftovers=await launcher.sweep(due))
            else:
                probed = await launcher.probe(directory, due)
                if not set(due).intersection(probed.jobs):
                    sweep = request
        except NotStarted as error:
            return replace(known, problem=str(error), sweep=sweep), ()
        self.refusals |= {known.host: probed.refusal}
        record = HostRecord(
            host=known.host,
            facts=probed.facts,
            seen_at=utc_now(),
            problem=probed.refusal or None,
            shared_dir=str(directory) if probed.is_shared else None,
            sweep=sweep,
        )
        return record, probed.jobs

    async def _fetch_logs(self, host: str, uids: Sequence[str]) -> None:
        """Fetch what is left on a host of jobs that have ended, and have it removed there.

        The agent that was to send it died, or was gone before all of it was sent.
        """
        launcher = self._launchers[host]
        found = await asyncio.to_thread(self._jobs, [JobUid(uid) for uid in uids])
        for uid, job in found.items():
            if isinstance(launcher, CommandLauncher) and job.is_terminal:
                try:
                    await launcher.fetch_logs(uid, self._data.job(job.job_id))
                except (NotStarted, OSError) as error:
                    words = f"the directory of job {job.job_id} stays on {host}: {error}"
                    _LOG.warning(words, action="logs_left", host=host)
