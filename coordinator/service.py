"""The coordinator's life: open the database, win the lease, serve, hand over or shut down.

SIGTERM hands over: agents and ranks go on, and the next coordinator adopts them. SIGINT shuts down:
ranks save and exit, and their jobs wait in the queue for the next start.
"""

import asyncio
import signal
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import structlog

from coordinator.address import keep_published
from coordinator.agents import AgentServer
from coordinator.attendants import Attendants
from coordinator.candidacy import Candidate
from coordinator.launcher import LocalLauncher
from coordinator.nudges import listen
from coordinator.roster import Roster
from coordinator.supervisor import RETRY_SECONDS, Supervisor
from muster.contracts.environ import ServiceSettings
from muster.contracts.layout import DataDirectory
from muster.descriptors import DescriptorLimits
from muster.lifeline import release_interrupt
from muster.processes import myself
from store.database import Database
from store.errors import StoreUnavailable
from store.leases import COORDINATOR_LEASE, Leases
from store.records import Lease
from store.tenure import Tenure

_LOG: Final = structlog.get_logger("coordinator")


class Service:
    """A coordinator over one open database."""

    def __init__(
        self,
        database: Database,
        settings: ServiceSettings,
        environ: Mapping[str, str],
        limits: DescriptorLimits,
    ) -> None:
        """`limits` are those that this process began with: its agents do, too."""
        self._limits = limits
        self._database = database
        self._settings = settings
        self._environ = environ
        self._leases = Leases(database)
        self._supervisor: Supervisor | None = None
        self._candidate: Candidate | None = None
        self._candidacy: asyncio.Task[Lease] | None = None
        self._shutting_down = False

    async def run(self) -> None:
        """Serve until a signal ends it. Raises `LeaseLost` when another one has taken over."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.hand_over)
        loop.add_signal_handler(signal.SIGINT, self.shut_down)
        nudges, address = await listen(self._nudge)
        self._candidate = Candidate(
            self._leases, owner=uuid.uuid4().hex, process=myself(), address=address
        )
        self._candidate.is_patient = not self._shutting_down
        self._candidacy = asyncio.ensure_future(self._candidate.win())
        release_interrupt()
        try:
            lease = await self._candidacy
            await self._serve(lease)
            with suppress(StoreUnavailable):  # a holder who is gone will do as well
                await asyncio.to_thread(self._leases.release, lease)
        except asyncio.CancelledError:
            return  # told to end, and not wanted
        finally:
            nudges.close()

    async def _serve(self, lease: Lease) -> None:
        attendants = Attendants(
            LocalLauncher(self._environ, self._limits),
            self._settings,
            lambda: self._holds(lease),
        )
        self._supervisor = Supervisor(
            tenure=Tenure(self._database, lease),
            roster=Roster(
                self._database, DataDirectory(self._settings.data_dir), slots=self._settings.slots
            ),
            attendants=attendants,
        )
        if self._shutting_down:
            self._supervisor.drain()
        await self._supervisor.take_over()
        agents = AgentServer(lease.epoch, self._supervisor)
        self._supervisor.attach(agents)
        address = await agents.start()
        publishing = asyncio.ensure_future(
            keep_published(
                address,
                DataDirectory(self._settings.data_dir).coordinator_address,
                lambda: self._holds(lease),
            )
        )
        _LOG.info(
            f"coordinates, with {self._settings.slots} slots",
            action="lease_taken",
            epoch=lease.epoch,
            port=address.port,
        )
        try:
            await self._supervisor.run()
        finally:
            publishing.cancel()
            await agents.flush()
            await agents.stop()
            await attendants.abandon()

    async def _holds(self, lease: Lease) -> bool:
        """Return whether the lease is still ours; waits for the database if that is away."""
        while True:
            try:
                current = await asyncio.to_thread(self._leases.current, COORDINATOR_LEASE)
            except StoreUnavailable:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return current is not None and current.epoch == lease.epoch

    def hand_over(self) -> None:
        """End soon; agents and ranks go on until the next coordinator starts."""
        if self._supervisor is not None:
            self._supervisor.leave()
        elif self._candidacy is not None:
            self._candidacy.cancel()

    def shut_down(self) -> None:
        """End once every rank has saved and exited; their jobs go back to the queue.

        Whoever does not coordinate yet does so first, if nobody else does: ranks of a predecessor
        may still run.
        """
        self._shutting_down = True
        if self._supervisor is not None:
            self._supervisor.drain()
        elif self._candidate is not None:
            self._candidate.is_patient = False

    def _nudge(self) -> None:
        if self._supervisor is not None:
            self._supervisor.nudge()
