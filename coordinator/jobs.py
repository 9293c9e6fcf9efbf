"""The unfinished jobs: loaded from rows, kept in step with them, admitted in turn."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from signal import SIGCHLD
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
from msgspec.structs import asdict

from coordinator.agents.lifecycle import AgentLifecycle
from coordinator.decide import actions, placement
from coordinator.decide.actions import Interrupted, SetStatus
from coordinator.decide.events import describe_held
from coordinator.decide.plan import plan
from coordinator.decide.state.job import AgentSnapshot, JobSnapshot
from coordinator.launchers.launcher import AgentProcess
from coordinator.persistence import (
    Attachment,
    Moment,
    ended_attempt_rows,
)
from coordinator.preparation import kept_code
from coordinator.restore import JobRows, snapshot_of
from coordinator.series import JobSeries
from coordinator.tracked_job import TrackedJob
from database.engine import Database
from database.errors import CheckpointPending, DatabaseUnavailable, JobMissing, JobOver
from database.history import History
from database.jobs import Jobs
from database.records import Job, RankRecord
from muster.checkpoints.errors import CheckpointError
from muster.checkpoints.local import LocalFileSystem, replace_file
from muster.checkpoints.store import open_store
from muster.cluster.description import Cluster
from muster.contracts.job.status import JobStatus, JobUid, Reason, StopRequest
from muster.contracts.location import parse_location
from muster.contracts.rank import ProcessState
from muster.contracts.settings.paths import DataDir, JobFiles, checkpoints_of_job, rank_place
from muster.host.code import read_code, script_of
from muster.host.processes import is_running, send_signal
from muster.runtime.exit_report import find_exit_record

Result = TypeVar("Result")

MINORITY_GRACE_SECONDS: Final = 8.0
"""For ranks to save once no majority answers: the other part starts them after 30 s of silence, of
which up to 15 s are over."""

BLIND_READ_SECONDS: Final = 0.5
"""Between reads of a database that cannot tell whether anything has changed."""


class JobTable:
    """All unfinished jobs by uid, in the order of submission.

    Level-triggered: what the API wrote is found by reading all unfinished rows, which costs
    microseconds while the database has not changed.
    """

    def __init__(
        self,
        database: Database,
        files: DataDir,
        *,
        cluster: Cluster,
        node: str,
        names: Mapping[str, str] = MappingProxyType({}),
        is_at_home: bool = False,
    ) -> None:
        """`node` is the id of this host: rows from before there was a cluster file name it so.

        `names` has what people call a host, if not as the cluster does. `is_at_home`: another host
        may have led before, and have checkpoints that this one lacks.
        """
        self.tracked: dict[JobUid, TrackedJob] = {}
        self._database = database
        self._files = files
        self._jobs = Jobs(database)
        self._history = History(database)
        self._cluster = cluster
        self._node = node
        self._is_at_home = is_at_home
        self.former = ""
        """The id of the node whose coordinator had the lease before us, if it was another one."""
        self.refusals: Mapping[str, str] = {}
        """By host, why no agent can be started there: a job that waits says so."""
        self.minority: Callable[[], str] = str
        """Returns why only jobs run that two parts of a divided cluster may run; "" if all do."""
        # Of the members of a group the first one saves.
        own_first = sorted(cluster.nodes, key=lambda node: node.transport != "local")
        self._hosts = {
            node.name: AgentSnapshot(
                host=node.name,
                name=names.get(node.name, ""),
                is_local=node.transport == "local",
                order=order,
            )
            for order, node in enumerate(own_first)
        }
        self._rows: Sequence[Job] = ()  # of the last read
        self._seen: int | None = None
        self._next_blind_read = 0.0

    def files(self, uid: JobUid) -> JobFiles:
        """Return where a job's files lie on this host."""
        return self._files.job(self.tracked[uid].snapshot.job_id)

    def admitted(self) -> list[TrackedJob]:
        """Return the jobs that have left the queue."""
        return [job for job in self.tracked.values() if job.is_admitted]

    def warm_up(self) -> None:
        """Read what `load` is going to read, as the first time takes longest."""
        self._with_ranks(self._jobs.unfinished())

    async def load(self, lifecycle: AgentLifecycle, now: Moment) -> list[TrackedJob]:
        """Take over every unfinished job; return those with a living agent.

        Ranks without an agent run on and wait for the next one. Where no rank lives, the remaining
        processes are ended.
        """
        if self.former:
            await wait_for_database(lambda: asyncio.to_thread(self._request_checkpoints))
        unfinished = await wait_for_database(lambda: asyncio.to_thread(self._jobs.unfinished))
        # A queued job has no processes.
        started = [row for row in unfinished if row.status is not JobStatus.QUEUED]
        found = await wait_for_database(lambda: asyncio.to_thread(self._with_ranks, started))
        searches = (lifecycle.find(self._snapshot_of(rows, now), rows.agents) for rows in found)
        for rows, agents in zip(found, await asyncio.gather(*searches), strict=True):
            self.tracked[rows.job.uid] = self._inherit(rows, agents, now)
        jobs = list(self.tracked.values())
        await wait_for_database(lambda: self._refresh(now))
        for job in self.tracked.values():  # of a `muster run`, which a person has typed anew
            job.takes_code |= self._files.is_foreground and not job.snapshot.any_alive
        # Requests of users are folded in first: they explain why some ranks have ended.
        for job in jobs:
            alone = [rank for rank in job.snapshot.ranks if rank.host not in job.agents]
            files = self._files.job(job.snapshot.job_id)
            for message in job.unreported_ends(files, alone):
                job.observe(message, now)
        await lifecycle.sweep(
            {
                job.snapshot.uid: [
                    process
                    for host, agent in job.snapshot.agents.items()
                    if agent.is_local
                    for process in job.known_processes(host)
                ]
                for job in jobs
                if not (job.snapshot.any_alive or job.snapshot.is_scheduled)
            }
        )
        return [job for job in jobs if job.agents]

    async def read_changes(self, now: Moment) -> None:
        """Take in what was written since the last read. Raises `DatabaseUnavailable`."""
        changes = self._database.changes()
        if changes is None:
            if time.monotonic() < self._next_blind_read:
                return
            self._next_blind_read = time.monotonic() + BLIND_READ_SECONDS
        elif changes == self._seen:
            return
        await self._refresh(now)
        self._seen = changes

    def admit(self, now: Moment) -> None:
        """Start the jobs at the head of the queue for which there is room."""
        waiting = [
            job
            for job in self.tracked.values()
            if job.snapshot.status is JobStatus.QUEUED and not job.snapshot.is_ending
        ]
        self._place_lost(now)
        self._look_for_checkpoints(now)
        if why := self.minority():
            self._pause_without_majority(why, now)
            waiting = [job for job in waiting if not job.snapshot.spec.needs_majority]
        if not waiting:
            return
        wanted = [job.snapshot for job in waiting]
        admissions = list(placement.admit(wanted, *self._room(), now.monotonic))
        for job, places in zip(waiting, admissions, strict=True):
            if not isinstance(places, str):
                job.decide([SetStatus(status=JobStatus.STARTING, message=job.snapshot.note)], now)
                job.decide(places, now)
                job.decide(plan(job.snapshot, now.monotonic), now)  # one commit, for its agents too
            elif job.snapshot.message != places:
                self._keep_waiting(job, places, now)

    def _pause_without_majority(self, why: str, now: Moment) -> None:
        """End, or do not start, the ranks that another part of a divided cluster may start, too."""
        for job in self.tracked.values():
            if not job.snapshot.spec.needs_majority or job.snapshot.is_ending:
                continue
            if job.is_admitted:
                job.observe(Interrupted(why=why, grace_seconds=MINORITY_GRACE_SECONDS), now)
            elif job.snapshot.message != why:
                self._keep_waiting(job, why, now)

    def _keep_waiting(self, job: TrackedJob, why: str, now: Moment) -> None:
        reason = Reason.WAITING_FOR_SLOTS
        job.decide([SetStatus(status=JobStatus.QUEUED, reason=reason, message=why)], now)

    def _room(self) -> tuple[Sequence[JobSnapshot], Cluster, Mapping[str, str]]:
        """Return the jobs that may hold slots, and where others may be."""
        return [job.snapshot for job in self.admitted()], self._cluster, self.refusals

    def _place_lost(self, now: Moment) -> None:
        """Choose hosts for ranks of admitted jobs that have none, or have lost it."""
        for job in self.admitted():
            if any(placement.ranks_to_place(job.snapshot, now.monotonic)):
                places = placement.place(job.snapshot, *self._room(), now.monotonic)
                job.decide(list(places), now)

    async def keep_code(self, job: TrackedJob) -> None:
        """Keep what is new of a job's code for the next coordinator; a full disk ends nothing."""
        code = job.snapshot.code.files
        if job.takes_code or code is job.kept_code:
            return
        job.kept_code = code
        with suppress(OSError):
            file = self._files.job(job.snapshot.job_id).code
            content = msgspec.json.encode(code)
            await asyncio.to_thread(replace_file, LocalFileSystem(), str(file), content)

    def wake_agents(self) -> None:
        """Make adopted agents look for the coordinator's address now: SIGCHLD wakes their loop."""
        for job in self.tracked.values():
            for agent in job.agents.values():
                if agent.record is not None:
                    with suppress(PermissionError):
                        send_signal(agent.record, SIGCHLD)

    def release(self, job: TrackedJob) -> None:
        """Forget a job that is over."""
        self.tracked.pop(job.snapshot.uid, None)

    async def _refresh(self, now: Moment) -> None:
        read = self._jobs.unfinished_with_departures
        unfinished, departures = await asyncio.to_thread(read, self._rows)
        self._rows = unfinished
        fresh = [row for row in unfinished if row.uid not in self.tracked]
        for rows in await asyncio.to_thread(self._with_ranks, fresh):
            snapshot = self._snapshot_of(rows, now)
            self.tracked[rows.job.uid] = _track(rows, snapshot, {}, now)
        for row in unfinished:
            _take_requests(self.tracked[row.uid], row, departures.get(row.job_id, ()), now)

    def _hosts_of(self, job: Job) -> Mapping[str, AgentSnapshot]:
        """Return the hosts on which a job may have ranks."""
        if not (names := job.spec.scheduled_hosts):
            return self._hosts
        return {
            name: AgentSnapshot(host=name, is_local=False, order=order)
            for order, name in enumerate(names)
        }

    def _request_checkpoints(self) -> None:
        """Have jobs whose ranks train together save here: the last saves may be elsewhere."""
        for job in self._jobs.unfinished():
            if job.spec.mode == "synchronous" and job.status is not JobStatus.QUEUED:
                with suppress(CheckpointPending, JobMissing, JobOver):
                    self._jobs.request_checkpoint(job.job_id)

    def _look_for_checkpoints(self, now: Moment) -> None:
        """Let ranks start whose newest checkpoint is on this host; an event names the others."""
        for job in self.admitted():
            snapshot = job.snapshot
            if any(rank.is_down and snapshot.is_held(rank) for rank in snapshot.ranks):
                held = _missing_steps(snapshot)
                if held != snapshot.held:
                    job.snapshot, job.has_news = replace(snapshot, held=held), True
                    if held:
                        where = self.former and snapshot.host_name(self.former)
                        job.note("checkpoints_away", describe_held(held, where), now.wall)

    def _with_ranks(self, jobs: Sequence[Job]) -> list[JobRows]:
        if not jobs:
            return []
        ids = [job.job_id for job in jobs]
        agents, ranks = self._history.agents_by_job(ids), self._history.ranks_by_job(ids)
        members, last_points = self._history.members_by_job(ids), self._history.last_points(ids)
        read = cache(read_code)  # the jobs of a sweep run one script
        return [
            JobRows(
                job=job,
                agents=agents[job.job_id],
                ranks=ranks[job.job_id],
                members=members[job.job_id],
                code=kept_code(self._files.job(job.job_id), job.uid)
                if ranks[job.job_id]
                else read(
                    script_of(job.spec.command, job.spec.program, job.spec.working_dir or "")
                ),
                series_until=last_points.get(job.job_id),
            )
            for job in jobs
        ]

    def _snapshot_of(
        self,
        rows: JobRows,
        now: Moment,
        agents: Collection[str] = (),
        living: Collection[int] = (),
    ) -> JobSnapshot:
        return snapshot_of(
            rows,
            now,
            hosts=self._hosts_of(rows.job),
            node=self._node,
            agents=agents,
            living=living,
            former=self.former,
        )

    def _inherit(self, rows: JobRows, agents: dict[str, AgentProcess], now: Moment) -> TrackedJob:
        """Return a job of the previous coordinator, with those of its agents that live."""
        files = self._files.job(rows.job.job_id)

        def may_live(rank: RankRecord) -> bool:
            if rank.process is not None and is_running(rank.process):
                return True
            # One whose end is recorded counts as alive until that record is folded in.
            is_open = rank.state != ProcessState.EXITED
            return is_open and bool(find_exit_record(files, rank.rank, rank.attempt, rank.process))

        alone = (rank for rank in rows.ranks if rank.host not in agents)
        living = [rank.rank for rank in alone if may_live(rank)]
        snapshot = self._snapshot_of(rows, now, agents, living)
        if self._is_at_home:
            snapshot = replace(snapshot, held={rank.rank: None for rank in rows.ranks})
        return _track(rows, snapshot, agents, now)


def _track(
    rows: JobRows, snapshot: JobSnapshot, agents: dict[str, AgentProcess], now: Moment
) -> TrackedJob:
    known = {row.host: row for row in rows.agents if row.host in agents}
    attachment = Attachment(
        started_at=rows.job.started_at,
        agents={host: agent.record for host, agent in agents.items() if agent.record is not None},
        tokens_sha256={host: row.token_sha256 for host, row in known.items() if row.token_sha256},
        master_port=rows.job.master_port,
        numeric_environment=rows.job.numeric_environment,
    )
    job = TrackedJob(
        snapshot=snapshot,
        attachment=attachment,
        agents=agents,
        committed_agents={row.host: row for row in rows.agents},
        committed_ranks={record.rank: record for record in rows.ranks},
        series=JobSeries(rows.series_until),
        takes_code=not rows.ranks,
        kept_code=snapshot.code.files,
        # What the coordinator before us has not done is dropped: it may have done it.
        faults_seen=max((fault.number for fault in rows.job.faults), default=0),
    )
    # A living agent reports the ends itself.
    alone = [row for row in rows.ranks if row.host not in agents]
    job.add_attempts(ended_attempt_rows(snapshot, alone, now))
    return job


def _missing_steps(snapshot: JobSnapshot) -> dict[int, int]:
    """Return the step of the newest checkpoint of each held rank for which it is not here."""
    missing: dict[int, int] = {}
    place = parse_location(snapshot.spec.checkpoint_dir or "")
    if not isinstance(place, Path):
        return missing
    earlier = snapshot.spec.earlier  # it may not have saved since it has resumed from that
    for number in snapshot.held:
        here = [-1]
        for job_id in (snapshot.job_id, *([earlier.job] if earlier else ())):
            own = checkpoints_of_job(place, job_id)
            if not snapshot.is_synchronous:
                own = rank_place(own, number)
            with suppress(CheckpointError):  # nor could the rank read it
                here += [name.step for name in open_store(own).names()]
        step = snapshot.ranks[number].progress.last_checkpoint_step
        if step is not None and step > max(here):
            missing[number] = step
    return missing


def _take_requests(job: TrackedJob, row: Job, departures: Collection[int], now: Moment) -> None:
    if row.stop_request is not None and job.snapshot.end.stop not in {
        row.stop_request,
        StopRequest.FORCED,
    }:
        grace = row.stop_grace_seconds
        grace = row.spec.stop_grace_seconds if grace is None else grace
        job.observe(actions.StopRequested(request=row.stop_request, grace_seconds=grace), now)
    job.faults += [fault for fault in row.faults if fault.number > job.faults_seen]
    job.faults_seen = max((fault.number for fault in row.faults), default=0)
    for worker_id in frozenset(departures) - job.leaving:
        job.leaving |= {worker_id}
        job.observe(actions.LeaveRequested(worker_id=worker_id), now)
    wanted = actions.ChangeRequested(
        wanted_world_size=row.world_size,
        wanted_hosts=row.wanted_hosts,
        pause_requested=row.pause_request,
        checkpoint_requests=row.checkpoint_requests,
    )
    if any(getattr(job.snapshot, name) != value for name, value in asdict(wanted).items()):
        job.observe(wanted, now)


async def wait_for_database(read: Callable[[], Awaitable[Result]]) -> Result:
    """Return what `read` returns; wait for the database while it is away."""
    while True:
        try:
            return await read()
        except DatabaseUnavailable:
            await asyncio.sleep(BLIND_READ_SECONDS)
