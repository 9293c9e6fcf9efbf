"""The jobs in a coordinator's care: loaded from rows, kept in step with them, let in by turn.

Level-triggered: whatever the API has written is found by looking at all that is unfinished. Until
somebody has written (we ourselves included) a look costs microseconds.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from coordinator import happenings
from coordinator.actions import Move
from coordinator.admission import Claim, admit
from coordinator.charge import Charge
from coordinator.exit_records import unheard_ends
from coordinator.incarnation_rows import ended_meanwhile
from coordinator.launcher import AgentProcess
from coordinator.moment import Moment
from coordinator.rows import Attachment, inherited, inherited_with_agent, snapshot_of
from muster.contracts.job import JobStatus, JobUid, Reason, StopRequest
from muster.contracts.layout import DataDirectory, JobFiles
from muster.contracts.pool import WorkerState
from muster.contracts.process import ProcessRecord
from muster.contracts.rank import ProcessState
from muster.exit_records import known_end
from muster.processes import is_running
from store.database import Database
from store.errors import StoreUnavailable
from store.jobs import Jobs
from store.members import Members
from store.records import Job, Member, Worker
from store.workers import Workers

Find = Callable[[Job], Awaitable[AgentProcess | None]]
Result = TypeVar("Result")
Sweep = Callable[[Mapping[JobUid, Sequence[ProcessRecord]]], Awaitable[None]]

BLIND_LOOK_SECONDS: Final = 0.5
"""Between looks at a database that cannot say whether anything has changed."""


class Roster:
    """All unfinished jobs, by their uid, in the order of submission."""

    def __init__(self, database: Database, files: DataDirectory, *, slots: int) -> None:
        self.charges: dict[JobUid, Charge] = {}
        self._database = database
        self._files = files
        self._jobs = Jobs(database)
        self._workers = Workers(database)
        self._members = Members(database)
        self._slots = slots
        self._rows: Sequence[Job] = ()
        """Of the last look."""
        self._seen: int | None = None
        self._next_blind_look = 0.0

    def admitted(self) -> list[Charge]:
        """Return the jobs that have left the queue."""
        return [charge for charge in self.charges.values() if charge.is_admitted]

    async def load(self, find: Find, sweep: Sweep, now: Moment) -> list[Charge]:
        """Take up every unfinished job, with what a predecessor has left of it.

        Return those whose agent `find` has found. Ranks without one live on if they can be told,
        and wait for another; where there is none, `sweep` ends what is left.
        """
        for job, workers, members in await self._as_soon_as_possible(self._rows_of_going):
            agent = await find(job)
            charge = (
                _orphaned(job, workers, members, self._files.job(job.job_id), now)
                if agent is None
                else _inherited(job, workers, members, agent, now)
            )
            self.charges[job.uid] = charge
        charges = list(self.charges.values())
        await self._as_soon_as_possible(lambda: self._refresh(now))
        # What a person had asked for comes first: it is why some of them have ended.
        for charge in charges:
            if charge.agent is None:
                for message in unheard_ends(charge.snapshot, self._files_of(charge)):
                    charge.learn(message, now)
        await sweep(
            {c.snapshot.uid: c.known_processes() for c in charges if not c.snapshot.any_alive}
        )
        return [charge for charge in charges if charge.agent is not None]

    async def look(self, now: Moment) -> None:
        """Take up what may have been written since the last look. Raises `StoreUnavailable`."""
        changes = self._database.changes()
        if changes is None:
            if time.monotonic() < self._next_blind_look:
                return
            self._next_blind_look = time.monotonic() + BLIND_LOOK_SECONDS
        elif changes == self._seen:
            return
        await self._refresh(now)
        self._seen = changes

    def admit(self, now: Moment) -> None:
        """Let in the jobs at the head of the queue that there is room for."""
        waiting = [
            charge
            for charge in self.charges.values()
            if charge.snapshot.status is JobStatus.QUEUED and charge.snapshot.stop is None
        ]
        if not waiting:
            return
        wanted = [
            Claim(job_id=charge.snapshot.job_id, slots=charge.snapshot.spec.world_size)
            for charge in waiting
        ]
        holding = [
            Claim(job_id=charge.snapshot.job_id, slots=charge.snapshot.slots)
            for charge in self.admitted()
        ]
        admitted, waits = admit(wanted, holding=holding, slots=self._slots)
        for charge in waiting[:admitted]:
            charge.decide([Move(status=JobStatus.STARTING, message=charge.snapshot.note)], now)
        for charge, wait in zip(waiting[admitted:], waits, strict=True):
            if charge.snapshot.message != wait.message:
                charge.decide([_stay(wait.message)], now)

    def release(self, charge: Charge) -> None:
        """Forget a job that is over."""
        self.charges.pop(charge.snapshot.uid, None)

    async def _refresh(self, now: Moment) -> None:
        unfinished = await asyncio.to_thread(self._jobs.unfinished, self._rows)
        self._rows = unfinished
        fresh = [job for job in unfinished if job.uid not in self.charges]
        for charge in await asyncio.to_thread(self._charges_of, fresh, now):
            self.charges[charge.snapshot.uid] = charge
        synchronous = [job.job_id for job in unfinished if job.spec.mode == "synchronous"]
        departures = await asyncio.to_thread(self._members.departures, synchronous)
        for job in unfinished:
            self._hear_stop(job, now)
            self._hear_wishes(job, departures.get(job.job_id, frozenset()), now)

    async def _as_soon_as_possible(self, read: Callable[[], Awaitable[Result]]) -> Result:
        """Return what `read` returns; wait for the database if that is away."""
        while True:
            try:
                return await read()
            except StoreUnavailable:
                await asyncio.sleep(BLIND_LOOK_SECONDS)

    def _files_of(self, charge: Charge) -> JobFiles:
        return self._files.job(charge.snapshot.job_id)

    async def _rows_of_going(self) -> list[tuple[Job, list[Worker], list[Member]]]:
        """Return the jobs of which something may run."""
        return await asyncio.to_thread(lambda: self._rows_of(self._going()))

    def _going(self) -> list[Job]:
        return [job for job in self._jobs.unfinished() if job.status is not JobStatus.QUEUED]

    def _charges_of(self, jobs: Sequence[Job], now: Moment) -> list[Charge]:
        return [
            _charge_of(job, workers, members, now) for job, workers, members in self._rows_of(jobs)
        ]

    def _rows_of(self, jobs: Sequence[Job]) -> list[tuple[Job, list[Worker], list[Member]]]:
        if not jobs:
            return []
        ids = [job.job_id for job in jobs]
        workers, members = self._workers.of_jobs(ids), self._members.of_jobs(ids)
        leaving = self._members.departures(ids)
        return [
            (job, workers[job.job_id], _without(leaving[job.job_id], members[job.job_id]))
            for job in jobs
        ]

    def _hear_wishes(self, job: Job, departures: frozenset[int], now: Moment) -> None:
        """Take up what a person wants of a pool; what is so already is not heard again."""
        charge = self.charges[job.uid]
        for worker_id in departures - charge.departures:
            charge.departures |= {worker_id}
            charge.learn(happenings.LeaveAsked(worker_id=worker_id), now)
        if job.world_size != charge.snapshot.wanted_world_size:
            charge.learn(happenings.Scaled(world_size=job.world_size), now)
        if job.pause_request != charge.snapshot.pause_asked:
            charge.learn(happenings.PauseAsked(paused=job.pause_request), now)

    def _hear_stop(self, job: Job, now: Moment) -> None:
        charge = self.charges[job.uid]
        if job.stop_request is None or charge.snapshot.stop in {
            job.stop_request,
            StopRequest.FORCED,
        }:
            return
        grace = job.stop_grace_seconds
        asked = happenings.StopAsked(
            request=job.stop_request,
            grace_seconds=job.spec.stop_grace_seconds if grace is None else grace,
        )
        charge.learn(asked, now)


def _charge_of(job: Job, rows: Sequence[Worker], members: Sequence[Member], now: Moment) -> Charge:
    charge = Charge(
        snapshot=snapshot_of(job, rows, members, now),
        attachment=Attachment(started_at=job.started_at),
        committed_workers={row.rank: row for row in rows},
    )
    charge.note(ended_meanwhile(charge.snapshot, rows, now))
    return charge


def _inherited(
    job: Job, rows: Sequence[Worker], members: Sequence[Member], agent: AgentProcess, now: Moment
) -> Charge:
    """Return a job that goes on; what has ended meanwhile its agent will tell."""
    return Charge(
        snapshot=inherited_with_agent(job, rows, members, now),
        attachment=Attachment(
            started_at=job.started_at,
            agent=agent.record,
            agent_token_sha256=job.agent_token_sha256,
            master_port=job.master_port,
        ),
        agent=agent,
        committed_workers={row.rank: row for row in rows},
    )


def _orphaned(
    job: Job, rows: Sequence[Worker], members: Sequence[Member], files: JobFiles, now: Moment
) -> Charge:
    """Return a job without an agent; whose end is on record is taken for alive until it is read."""
    living = [
        row.rank
        for row in rows
        if (row.process is not None and is_running(row.process))
        or (
            row.state != ProcessState.EXITED
            and known_end(files, row.rank, row.incarnation, row.process) is not None
        )
    ]
    charge = Charge(
        snapshot=inherited(job, rows, members, now, living=living),
        attachment=Attachment(started_at=job.started_at, master_port=job.master_port),
        committed_workers={row.rank: row for row in rows},
    )
    charge.note(ended_meanwhile(charge.snapshot, rows, now))
    return charge


def _without(leaving: Collection[int], members: Sequence[Member]) -> list[Member]:
    """Return the members as they will be once each that was asked to leave has heard of it.

    Else a coordinator that has just come would let others go in their place.
    """
    return [
        replace(member, state=WorkerState.DRAINING)
        if member.worker_id in leaving and member.state == WorkerState.ACTIVE
        else member
        for member in members
    ]


def _stay(message: str) -> Move:
    return Move(status=JobStatus.QUEUED, reason=Reason.WAITING_FOR_SLOTS, message=message)
