"""Who coordinates, and since when: what the lease says, looked at all the while."""

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
    """Somebody has the lease, since `at`, in seconds since 1970."""

    at: float
    epoch: int
    process: ProcessRecord


class Office:
    """Looks every `LOOK_SECONDS`; to be closed."""

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
        """Return who was seen last in office; it may have ended since."""
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
