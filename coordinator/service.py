"""The coordinator's life: open the database, win the lease, serve, hand over or shut down.

SIGTERM hands over: agents and ranks go on and the next coordinator takes them up. SIGINT shuts
down: ranks save and exit, and their jobs wait in the queue for the next start.
"""

import asyncio
import signal
import uuid
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from coordinator.address import publish
from coordinator.agents import AgentServer
from coordinator.attendants import Attendants
from coordinator.candidacy import Candidate
from coordinator.launcher import LocalLauncher
from coordinator.nudges import listen
from coordinator.roster import Roster
from coordinator.supervisor import Supervisor
from muster.contracts.environ import ServiceSettings
from muster.contracts.layout import DataDirectory
from muster.processes import myself
from store.database import Database
from store.leases import Leases
from store.records import Lease
from store.tenure import Tenure

_LOG: Final = structlog.get_logger("coordinator")


class Service:
    """A coordinator over one open database."""

    def __init__(
        self, database: Database, settings: ServiceSettings, environ: Mapping[str, str]
    ) -> None:
        self._database = database
        self._settings = settings
        self._environ = environ
        self._leases = Leases(database)
        self._supervisor: Supervisor | None = None
        self._candidacy: asyncio.Task[Lease] | None = None

    async def run(self) -> None:
        """Serve until a signal ends it. Raises `LeaseLost` when another one has taken over."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.hand_over)
        loop.add_signal_handler(signal.SIGINT, self.shut_down)
        nudges, address = await listen(self._stir)
        candidate = Candidate(
            self._leases, owner=uuid.uuid4().hex, process=myself(), address=address
        )
        self._candidacy = asyncio.ensure_future(candidate.win())
        try:
            lease = await self._candidacy
            await self._serve(lease)
            await asyncio.to_thread(self._leases.release, lease)
        except asyncio.CancelledError:
            return  # told to end before the lease was won
        finally:
            nudges.close()

    async def _serve(self, lease: Lease) -> None:
        attendants = Attendants(LocalLauncher(self._environ), self._settings)
        self._supervisor = Supervisor(
            tenure=Tenure(self._database, lease),
            roster=Roster(
                self._database, DataDirectory(self._settings.data_dir), slots=self._settings.slots
            ),
            attendants=attendants,
        )
        agents = AgentServer(lease.epoch, self._supervisor)
        self._supervisor.attach(agents)
        address = await agents.start()
        publish(address, DataDirectory(self._settings.data_dir).coordinator_address)
        _LOG.info(
            f"coordinates, with {self._settings.slots} slots",
            action="lease_taken",
            epoch=lease.epoch,
            port=address.port,
        )
        try:
            await self._supervisor.run()
        finally:
            await agents.flush()
            await agents.stop()
            await attendants.abandon()

    def hand_over(self) -> None:
        """End soon; agents and ranks go on."""
        self._end(Supervisor.leave)

    def shut_down(self) -> None:
        """End once every rank has saved and exited; their jobs go back to the queue."""
        self._end(Supervisor.drain)

    def _stir(self) -> None:
        if self._supervisor is not None:
            self._supervisor.stir()

    def _end(self, how: Callable[[Supervisor], None]) -> None:
        if self._supervisor is not None:
            how(self._supervisor)
        elif self._candidacy is not None:
            self._candidacy.cancel()
