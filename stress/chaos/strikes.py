"""Injects the faults: selects the process, waits for the moment, signals it and checks the effect.

Signals go by (pid, start time), so a reused pid is never hit.
"""

import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import TypeVar

from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import SPARE_RANK
from muster.contracts.settings.paths import checkpoints_of_job, checkpoints_of_rank
from muster.host.processes import descendants, identify, is_running, send_signal
from stress.chaos.faults import Blow, Fault, Kind, Victim
from stress.chaos.jobs import Training, Workload
from stress.chaos.observer import LeaseObserver, Observer
from stress.chaos.saves import Saves, StoreSaves
from stress.frozen_hosts import command_of
from stress.runner import say
from tests.support.faulty_store import FaultyStore
from tests.support.installation import Installation
from tests.support.s3_server import own_server

LOOK_SECONDS = 0.02
SEARCH_SECONDS = 15.0
"""For a process that the fault can hit: a rank may be in its backoff."""
STEP_SECONDS = 20.0
"""For the step between two faults."""
SAVE_SECONDS = 4.0
"""For a checkpoint to begin."""
END_SECONDS = 40.0
"""For the end of the signalled process: a frozen rank must time out first."""
STILL_SECONDS = 1.0
TRIES = 3
"""Attempts for faults whose targets ended before the signal."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process and its role."""

    record: ProcessRecord
    job_id: str | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """An injected fault."""

    fault: Fault
    target: Target
    at: float
    """Unix time."""
    until: float
    """When it took effect; until then the process may have continued."""
    inside: bool
    """True if a checkpoint was being written at that moment."""
    observed: bool
    """True if the process ended or stopped as intended."""
    woken: bool
    """True if it had to be resumed because it was not killed."""

    def __str__(self) -> str:
        rank, job_id = self.target.rank, self.target.job_id
        whose = ("" if rank is None else f" {rank}") + ("" if job_id is None else f" of {job_id}")
        notes = [
            note
            for note, holds in {
                "inside a checkpoint": self.inside,
                "WITHOUT EFFECT": not self.observed,
                "had to be resumed": self.woken,
            }.items()
            if holds
        ]
        words = f"{self.fault.number}: {self.fault.kind} {self.fault.victim}{whose}"
        return ", ".join([f"{words} (pid {self.target.record.pid})", *notes])


class Striker:
    """Injects one group of faults after the other."""

    def __init__(
        self,
        installation: Installation,
        workload: Workload,
        observer: Observer,
        leases: LeaseObserver,
        store: FaultyStore | None = None,
    ) -> None:
        """`store` is the proxy in front of the object store, if jobs save there."""
        self._installation = installation
        self._store = store
        self._workload = workload
        self._observer = observer
        self._leases = leases
        self._steps: dict[str, int] = {}
        """The step of each job at the last fault."""
        self.strikes: list[Strike] = []
        self.missed: list[Fault] = []
        """Faults for which no process was found."""

    def strike(self, blow: Blow) -> None:
        """Inject the faults and wait until they have taken effect."""
        time.sleep(blow.faults[0].pause_seconds)
        if blow.faults[0].waits_for_a_step:
            awaited(self._has_stepped, STEP_SECONDS)
        for _ in range(TRIES):
            if self._has_struck(blow):
                break
        else:
            self.missed.extend(blow.faults)
        self._steps = {it.job_id: self._steps_of(it) for it in self._workload.lively()}

    def _has_struck(self, blow: Blow) -> bool:
        """Signal all targets at once; return False if all of them had ended."""
        found = self._targets(blow)
        saves = self._reach_instant(*found[0]) if found else None
        with saves or ExitStack():
            struck = [
                (fault, target, time.time())
                for fault, target in found
                if send_signal(target.record, fault.kind.signal)
            ]
            inside = saves is not None and saves.is_unfinished()
        for fault, target, at in struck:
            self._see_through(fault, target, at=at, inside=inside)
        return bool(struck)

    def _targets(self, blow: Blow) -> list[tuple[Fault, Target]]:
        """Two faults at once meet two processes, or else there is only one."""
        found: list[tuple[Fault, Target]] = []
        for fault in blow.faults:
            target = awaited(lambda fault=fault: self._find(fault), SEARCH_SECONDS)
            if target is not None and target not in [other for _, other in found]:
                found.append((fault, target))
        return found

    # Selecting the process

    def _find(self, fault: Fault) -> Target | None:
        candidates = self._candidates(fault.victim)
        if fault.kind is Kind.FREEZE and fault.victim.belongs_to_a_job:
            # A process that never sent a heartbeat has no heartbeat timeout.
            candidates = [it for it in candidates if self._beats(it)]
        if not candidates:
            return None
        target = candidates[int(fault.lot * len(candidates))]
        return target if fault.calls is None else self._who_saves(target, candidates)

    def _who_saves(self, target: Target, candidates: list[Target]) -> Target:
        """Return the rank that saves for the one that was chosen: the first of its group."""
        together = [it.job_id for it in self._workload.lively() if it.is_together]
        if target.rank is None or target.job_id not in together:
            return target
        group = [it for it in candidates if it.job_id == target.job_id]
        return min(group, key=lambda it: (it.record.start_ticks, it.record.pid))

    def _beats(self, target: Target) -> bool:
        """True if the rank, or any rank of the agent, sends heartbeats."""
        beating = self._observer.beating(target.job_id or "")
        return bool(beating) if target.rank is None else target.record.pid in beating

    def _candidates(self, victim: Victim) -> list[Target]:
        if not victim.belongs_to_a_job:
            record = {
                Victim.API: lambda: identify(self._installation.api.pid),
                Victim.COORDINATOR: self._leases.holder,
                Victim.FORK_SERVER: self._fork_server,
                Victim.STORE: lambda: identify(own_server()[1]),
            }[victim]()
            return [Target(record=record)] if record is not None and is_running(record) else []
        lively = {it.uid: it for it in self._workload.lively()}
        heads: dict[str, ProcessRecord] = {}
        for record, tag in self._installation.tagged():
            # Children have the same tag; the oldest process is the rank itself.
            older = heads.get(tag, record)
            heads[tag] = min(older, record, key=lambda it: (it.start_ticks, it.pid))
        return [
            Target(record=record, job_id=lively[uid].job_id, rank=rank)
            for tag, record in sorted(heads.items())
            for uid, kind, rank in [_parsed(tag)]
            if uid in lively and kind is victim
        ]

    def _fork_server(self) -> ProcessRecord | None:
        holder = self._leases.holder()
        below = [] if holder is None else descendants(holder.pid)
        servers = (pid for pid in below if "worker.fork_server" in command_of(pid))
        return next(map(identify, servers), None)

    # Waiting for the moment

    def _has_stepped(self) -> bool:
        lively = self._workload.lively()
        return any(self._steps_of(it) > self._steps.get(it.job_id, 0) for it in lively)

    def _steps_of(self, training: Training) -> int:
        return self._observer.steps(training.job_id)

    def _reach_instant(self, fault: Fault, target: Target) -> Saves | StoreSaves | None:
        """Return the save in progress, if the fault belongs inside one."""
        if fault.calls is None:
            return None
        saves: Saves | StoreSaves
        if self._store is not None:
            saves = StoreSaves(self._store)
        else:
            directory = self._directory(fault, target)
            if directory is None or not directory.is_dir():
                return None
            saves = Saves(directory)
        if saves.reach(fault.calls, SAVE_SECONDS):
            return saves
        saves.close()
        return None

    def _directory(self, fault: Fault, target: Target) -> Path | None:
        """Return where the victim saves; for one that does not save, where any job saves."""
        root = self._installation.checkpoint_dir
        lively = self._workload.lively()
        mine = [it for it in lively if target.job_id in {None, it.job_id}]
        if not mine:
            return None
        job = mine[int(fault.lot * len(mine))]
        if job.is_together:
            return checkpoints_of_job(root, job.job_id)
        return checkpoints_of_rank(root, job.job_id, target.rank or 0)

    # Checking the effect

    def _see_through(self, fault: Fault, target: Target, *, at: float, inside: bool) -> None:
        record, woken = target.record, False
        if fault.kind is Kind.NAP:
            observed = _stands_still(record)
            time.sleep(fault.nap_seconds)
            send_signal(record, SIGCONT)
        elif fault.kind is Kind.FREEZE and fault.victim is Victim.COORDINATOR:
            observed = self._stops_outside_transactions(record) and self._is_displaced(record)
        else:
            observed = bool(awaited(lambda: not is_running(record), END_SECONDS))
            woken = not observed and send_signal(record, SIGCONT)
        strike = Strike(
            fault=fault,
            target=target,
            at=at,
            until=time.time(),
            inside=inside,
            observed=observed,
            woken=woken,
        )
        self.strikes.append(strike)
        say(f"{time.strftime('%H:%M:%S', time.localtime(at))}  {strike}")

    def _stops_outside_transactions(self, record: ProcessRecord) -> bool:
        """True if it stands still; inside a transaction no other one could take over (limits)."""
        while (stands_still := _stands_still(record)) and _is_locked(self._installation.files.root):
            send_signal(record, SIGCONT)
            time.sleep(LOOK_SECONDS)
            send_signal(record, SIGSTOP)
        return stands_still

    def _is_displaced(self, record: ProcessRecord) -> bool:
        """True if another coordinator takes over and this one exits after SIGCONT."""
        others = awaited(lambda: self._leases.holder() != record, END_SECONDS)
        send_signal(record, SIGCONT)
        return others and bool(awaited(lambda: not is_running(record), END_SECONDS))


def awaited(look: Callable[[], Found], seconds: float) -> Found:
    """Return the first true value of `look`, or its last one after the timeout."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return found


def _parsed(tag: str) -> tuple[str, Victim | None, int | None]:
    """Return the job's uid, what the process is, and its rank."""
    uid, _, rest = tag.partition("/")
    what = rest.split("/")[0]
    if what.isdigit():
        is_spare = int(what) == SPARE_RANK
        return (uid, Victim.SPARE, None) if is_spare else (uid, Victim.RANK, int(what))
    return uid, Victim(what) if what in {"agent", "prefork", "storage"} else None, None


def _is_locked(data_dir: Path) -> bool:
    """True if a stopped process keeps other writers out: running ones are done sooner."""
    path = data_dir / "muster.db"
    with closing(sqlite3.connect(path, timeout=STILL_SECONDS, isolation_level=None)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


def _stands_still(record: ProcessRecord) -> bool:
    """True if the kernel reports the process as stopped, which takes a moment."""
    return awaited(lambda: _state(record.pid) == "T", STILL_SECONDS)


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]
