"""Polls the jobs through the API, and the lease, and records what it sees and when."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from database.engine import Database
from database.errors import DatabaseUnavailable
from database.leases import Leases
from muster.contracts.job.status import TERMINAL
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.services import ServiceSettings
from tests.support.installation import Installation

LOOK_SECONDS = 0.1
LEASE_LOOK_SECONDS = 0.03

WELL = frozenset({"live", "finished"})


@dataclass(frozen=True, slots=True)
class RankSeen:
    state: str
    pid: int | None
    beats: bool
    """True after the first message: heartbeats are expected from now on."""


@dataclass(frozen=True, slots=True)
class JobSeen:
    """One job at one moment."""

    status: str
    step: int
    ranks: tuple[RankSeen, ...]

    @property
    def is_over(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_well(self) -> bool:
        """True if every rank trains or is done."""
        return self.is_over or all(rank.state in WELL for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class Look:
    """All jobs at one moment (Unix time)."""

    at: float
    jobs: Mapping[str, JobSeen]


class Observer:
    """Polls every `LOOK_SECONDS`; records nothing while the API is down."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._attended: list[str] = []
        self._last: dict[str, JobSeen] = {}
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.looks: list[Look] = []
        self.refusals: list[str] = []
        """Responses of the API that were not a job."""

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._is_ending.set()
        self._thread.join()

    def attend(self, job_id: str) -> None:
        """Observe this job too, until it ends."""
        self._attended.append(job_id)

    def last(self, job_id: str) -> JobSeen | None:
        """Return the last observation of the job."""
        return self._last.get(job_id)

    def is_over(self, job_id: str) -> bool:
        seen = self._last.get(job_id)
        return seen is not None and seen.is_over

    def beating(self, job_id: str) -> set[int | None]:
        """Return the pids of the ranks that send heartbeats."""
        seen = self._last.get(job_id)
        return set() if seen is None else {rank.pid for rank in seen.ranks if rank.beats}

    def steps(self, job_id: str) -> int:
        seen = self._last.get(job_id)
        return 0 if seen is None else seen.step

    def _run(self) -> None:
        while not self._is_ending.wait(LOOK_SECONDS):
            at = time.time()
            try:
                lively = [it for it in self._attended if not self.is_over(it)]
                jobs = {job_id: self._see(job_id) for job_id in lively}
            except httpx.TransportError:
                continue
            except AssertionError as refusal:
                self.refusals.append(str(refusal))
                continue
            self._last.update(jobs)
            self.looks.append(Look(at, jobs))

    def _see(self, job_id: str) -> JobSeen:
        seen = self._installation.see(job_id)
        return JobSeen(seen["status"], seen["step"], tuple(map(_rank_seen, seen["workers"])))


def _rank_seen(worker: Mapping[str, Any]) -> RankSeen:
    return RankSeen(
        worker["process"],
        worker["pid"],
        worker["last_heartbeat_age_seconds"] is not None,
    )


@dataclass(frozen=True, slots=True)
class Term:
    """One holder of the lease, since `at` (Unix time)."""

    at: float
    epoch: int
    process: ProcessRecord


class LeaseObserver:
    """Polls the lease every `LEASE_LOOK_SECONDS`."""

    def __init__(self, installation: Installation) -> None:
        settings = ServiceSettings.read(installation.environment, cores=1)
        self._database = Database.open(settings.database)
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
        while not self._is_ending.wait(LEASE_LOOK_SECONDS):
            at = time.time()
            try:
                lease = self._leases.current()
            except DatabaseUnavailable:
                continue
            if lease is not None and (not self.terms or self.terms[-1].epoch != lease.epoch):
                self.terms.append(Term(at, lease.epoch, lease.process))
