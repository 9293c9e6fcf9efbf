"""Records which coordinator holds the lease, and since when."""

import threading
import time
from dataclasses import dataclass

from database.engine import Database
from database.errors import DatabaseUnavailable
from database.leases import COORDINATOR_LEASE, Leases
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings import ServiceSettings
from tests.support.installation import Installation

LOOK_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class Term:
    """One holder of the lease, since `at` (Unix time)."""

    at: float
    epoch: int
    process: ProcessRecord


class Office:
    """Polls the lease every `LOOK_SECONDS`."""

    def __init__(self, installation: Installation) -> None:
        settings = ServiceSettings.read(installation.environment, cores=1)
        self._database = Database.open(settings.database_url)
        self._leases = Leases(self._database)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.terms: list[Term] = []

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._is_ending.set()
        self._thread.join()
        self._database.close()

    def holder(self) -> ProcessRecord | None:
        """Return the last holder seen; it may have ended since."""
        return self.terms[-1].process if self.terms else None

    def _run(self) -> None:
        while not self._is_ending.wait(LOOK_SECONDS):
            at = time.time()
            try:
                lease = self._leases.current(COORDINATOR_LEASE)
            except DatabaseUnavailable:
                continue
            if lease is not None and (not self.terms or self.terms[-1].epoch != lease.epoch):
                self.terms.append(Term(at, lease.epoch, lease.process))
