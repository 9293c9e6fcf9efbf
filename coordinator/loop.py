"""The coordinator's one loop: observe, fold, plan, commit, perform.

All observations come through one inbox with one consumer. A decision is taken into the snapshot,
made durable, and only then performed: a successor never meets an effect whose cause is not in the
rows. The one exception is the group round after the durable one, which no successor uses. While the
database is away nothing else is performed; ranks run on.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from coordinator.agents.checkpoint_receiver import JobDirectories
from coordinator.agents.launching import prepare_starts
from coordinator.agents.lifecycle import AgentLifecycle
from coordinator.agents.requests import Executor
from coordinator.agents.server import AgentServer
from coordinator.decide.actions import (
    AgentConnected,
    AgentDisconnected,
    AgentSaid,
    AgentStarved,
    Interrupted,
    LoopStalled,
    Observation,
)
from coordinator.jobs import JobTable
from coordinator.persistence import COMMIT_AFTER_SECONDS, Moment, Urgency
from coordinator.tracked_job import Draft, TrackedJob
from database.errors import DatabaseUnavailable
from database.fenced_writer import FencedWriter
from muster.contracts.job.status import JobUid
from muster.contracts.location import parse_location
from muster.contracts.messages.agent import (
    AgentClaim,
    AgentHeartbeat,
    AgentHello,
    AgentMessage,
    CheckpointsListed,
    JoinRequest,
    RankDied,
    RankSaid,
)
from muster.contracts.messages.attach import LaunchAgent, OrderFailed
from muster.contracts.messages.logs import LogsDrained
from muster.contracts.messages.rank import Heartbeat
from muster.contracts.settings.paths import JobFiles, LogName
from muster.contracts.token import matches
from muster.host.trace import stamp

POLL_SECONDS: Final = 0.25
"""How often the rows are checked for changes, in case a wake-up is lost; a check is cheap."""

LONG_ROUND_SECONDS: Final = 0.05  # a round that takes longer is followed by a pause

PAUSE_FACTOR: Final = 2
"""Length of that pause in rounds. It delays only wake-ups, never what agents report."""

EXIT_SECONDS: Final = 0.02  # after a death, for its containment and its record

RETRY_SECONDS: Final = 0.5  # between attempts to commit while the database is away

DATABASE_WAIT_SECONDS: Final = 5.0
"""How long a coordinator that has to end waits for a database that is away."""

TICK_SECONDS: Final = 0.5
STALL_SECONDS: Final = 1.0
"""A tick that is later than this means that the process or its machine stood still."""

_LOG: Final = structlog.get_logger("coordinator")


class CoordinatorLoop:
    """Runs every job of one database for as long as the lease lasts."""

    def __init__(
        self,
        *,
        writer: FencedWriter,
        jobs: JobTable,
        lifecycle: AgentLifecycle,
        addresses: Mapping[str, str],
        on_host_changed: Callable[[str], None] = lambda _host: None,
        clock: Callable[[], float] = time.monotonic,
        database_wait_seconds: float = DATABASE_WAIT_SECONDS,
    ) -> None:
        self._writer = writer
        self._jobs = jobs
        self._lifecycle = lifecycle
        lifecycle.observe = self.observe
        self._on_host_changed = on_host_changed
        self._clock = clock
        self._inbox: deque[tuple[JobUid, Observation, Moment]] = deque()
        self._woken = asyncio.Event()
        self._executor = Executor(lifecycle, addresses)
        self._paused_until = 0.0
        self._is_wake_up_due = False
        self._committed_at = 0.0
        self._commit_due_at = math.inf
        self._retry_at = 0.0
        self._failing_since: float | None = None
        self._is_handing_over = False
        self._is_draining = False
        self._told_to_end_at = float("inf")
        self._database_wait_seconds = database_wait_seconds
        self._ticked_at = 0.0
        self._ticker: asyncio.TimerHandle | None = None

    def attach(self, agents: AgentServer) -> None:
        """Set the server that sends requests to agents; we are its listener."""
        self._executor.agents = agents

    # What agents report (coordinator.agents.server.Listener)

    def token_sha256(
        self, claim: AgentHello | AgentClaim | JoinRequest, *, is_remote: bool = False
    ) -> str | None:
        job = self._jobs.tracked.get(JobUid(claim.job_uid))
        agent = None if job is None else job.snapshot.agents.get(claim.host)
        if job is None or agent is None or claim.agent_number != agent.agent_number:
            return None
        if is_remote and agent.is_local:
            return None
        return job.attachment.tokens_sha256.get(claim.host)

    def joining(
        self, request: JoinRequest
    ) -> AbstractAsyncContextManager[LaunchAgent | OrderFailed]:
        job = self._jobs.tracked.get(JobUid(request.job_uid))
        job = job if self.is_expected(request) else None
        return self._lifecycle.starter.joining(job, request)

    def is_expected(self, hello: AgentHello | JoinRequest) -> bool:
        digest = self.token_sha256(hello)
        if digest is None or not matches(hello.token, digest):
            return False
        return self._jobs.tracked[JobUid(hello.job_uid)].snapshot.agents[hello.host].is_wanted

    def on_refused(self, uid: JobUid, why: str) -> None:
        job = self._jobs.tracked.get(uid)
        if job is not None:
            job.note("agent_refused", why, self._now().wall)
            self.wake()

    def on_connected(self, hello: AgentHello) -> None:
        self._on_host_changed(hello.host)
        job = self._jobs.tracked.get(JobUid(hello.job_uid))
        if job is not None and job.snapshot.is_scheduled:
            job.addresses[hello.host] = hello.address
        if job is not None and hello.sends_checkpoints and hello.host not in job.senders:
            job.senders.add(hello.host)
            spec = job.snapshot.spec
            name = job.snapshot.host_name(hello.host)
            words = f"{name} does not share {spec.checkpoint_dir}: it sends its checkpoints"
            if spec.command is not None:
                words += f", and files that the program itself writes there stay on {name}"
            job.note("checkpoints_sent", words, self._now().wall)
        connected = AgentConnected(host=hello.host, agent_number=hello.agent_number)
        self.observe(JobUid(hello.job_uid), connected)

    def on_disconnected(self, hello: AgentHello) -> None:
        self._on_host_changed(hello.host)
        self._lifecycle.ask_schedulers()
        disconnected = AgentDisconnected(host=hello.host, agent_number=hello.agent_number)
        self.observe(JobUid(hello.job_uid), disconnected)

    def on_message(self, hello: AgentHello, message: AgentMessage) -> None:
        uid = JobUid(hello.job_uid)
        job = self._jobs.tracked.get(uid)
        if job is None or job.snapshot.agents[hello.host].agent_number != hello.agent_number:
            return
        match message:
            case AgentHello():
                pass  # said once already
            case AgentHeartbeat() | CheckpointsListed():
                self.observe(uid, AgentSaid(host=hello.host, message=message))
            case _:
                self.observe(uid, message)

    def checkpoint_directories(self, claim: AgentClaim) -> JobDirectories | None:
        job = self._jobs.tracked.get(JobUid(claim.job_uid))
        if job is None or self.token_sha256(claim) is None:
            return None
        spec = job.snapshot.spec
        place = parse_location(spec.checkpoint_dir or "")
        if not isinstance(place, Path):
            return None  # it saves in an object store
        earlier = None if spec.earlier is None else place / spec.earlier.job
        return JobDirectories(own=place / job.snapshot.job_id, inherited=earlier)

    # What their senders of logs need (coordinator.agents.log_receiver.LogListener)

    def coordinator_files(self, claim: AgentClaim) -> JobFiles | None:
        return self._jobs.files(JobUid(claim.job_uid)) if self.token_sha256(claim) else None

    def may_send(self, claim: AgentClaim, name: LogName) -> bool:
        job = self._jobs.tracked.get(JobUid(claim.job_uid))
        if job is None or name.rank >= len(job.snapshot.ranks):
            return False
        rank = job.snapshot.ranks[name.rank]
        # The host of an attempt that has ended is known from its log alone.
        is_here = rank.host == claim.host or not rank.is_alive
        return name.attempt < rank.attempt.number + is_here

    def is_draining(self, uid: JobUid, host: str) -> bool:
        job = self._jobs.tracked.get(uid)
        agent = None if job is None else job.snapshot.agents.get(host)
        return agent is not None and agent.logs.is_open

    def on_drained(self, claim: AgentClaim, message: LogsDrained) -> None:
        self.observe(JobUid(claim.job_uid), AgentSaid(host=claim.host, message=message))

    def observe(self, uid: JobUid, observation: Observation) -> None:
        """Put an observation into the inbox, with the present time."""
        self._inbox.append((uid, observation, self._now()))
        said = observation.message if isinstance(observation, RankSaid | AgentSaid) else observation
        if not _is_routine(said):
            stamp("observed", job=uid, observation=type(said).__name__)
            self.wake()

    def wake(self) -> None:
        """Read the rows now."""
        self._woken.set()

    def wake_soon(self) -> None:
        """Read the rows at once, or after the pause that follows a long round.

        With thousands of jobs a round takes long, and their submission needs the machine as well.
        """
        pause = self._paused_until - self._clock()
        if pause <= 0:
            self.wake()
        elif not self._is_wake_up_due:
            self._is_wake_up_due = True
            asyncio.get_running_loop().call_later(pause, self.wake)

    # Start and end

    async def take_over(self) -> None:
        """Load the jobs: living agents are adopted, processes of jobs without one are ended.

        To be called before agents can connect: an agent that is not expected then is dismissed.
        """
        for job in await self._jobs.load(self._lifecycle, self._now()):
            await self._lifecycle.adopt(job)

    def hand_over(self) -> None:
        """End after a last commit; agents and ranks run on."""
        self._is_handing_over = True
        self._told_to_end_at = min(self._told_to_end_at, self._clock())
        self.wake()

    def drain(self) -> None:
        """End once every job has saved and is back in the queue."""
        self._is_draining = True
        self._told_to_end_at = min(self._told_to_end_at, self._clock())
        self.wake()

    async def run(self) -> None:
        """Run until `hand_over`, or until `drain` is done.

        Raises `LeaseLost`, and the error of an agent's task that could not do its work.
        """
        self._ticked_at = self._clock()
        self._tick()
        try:
            while not self._is_done():
                await self._wait()
                began = self._clock()
                self._lifecycle.raise_error()
                is_urgent = any(isinstance(message, RankDied) for _, message, _ in self._inbox)
                self._fold_inbox()
                if is_urgent and self._plan():
                    # The exit of the rank follows within milliseconds: one commit is for both.
                    asyncio.get_running_loop().call_later(EXIT_SECONDS, self.wake)
                    continue
                await self._read_and_admit()
                await self._act()
                now = self._clock()
                if now - began > LONG_ROUND_SECONDS:
                    self._paused_until = now + PAUSE_FACTOR * (now - began)
            await self._commit_at_end()
        finally:
            if self._ticker is not None:
                self._ticker.cancel()

    def _is_done(self) -> bool:
        is_empty = not self._jobs.admitted() and not self._inbox and self._lifecycle.is_idle
        return self._is_handing_over or (self._is_draining and is_empty)

    # One round

    async def _wait(self) -> None:
        """Sleep until an observation comes, a plan is due, or the rows may have changed."""
        now = self._clock()
        moments = [self._commit_due_at, *(job.plan_at for job in self._jobs.tracked.values())]
        if now < self._retry_at:
            moments = []  # no decision before the next attempt to commit
        seconds = min([POLL_SECONDS, *(moment - now for moment in moments)])
        alarm = asyncio.get_running_loop().call_later(max(0.0, seconds), self._woken.set)
        await self._woken.wait()
        alarm.cancel()
        self._woken.clear()
        self._is_wake_up_due = False

    def _tick(self) -> None:
        """Shift all deadlines if the event loop stood still: it could receive nothing meanwhile."""
        stalled_seconds = self._clock() - self._ticked_at - TICK_SECONDS
        self._ticked_at = self._clock()
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        if stalled_seconds > STALL_SECONDS:
            self._committed_at = 0.0  # the lease may be lost: the next commit, made at once, tells
            for uid in self._jobs.tracked:
                self.observe(uid, LoopStalled(seconds=stalled_seconds))

    def _fold_inbox(self) -> None:
        self._tick()  # before any judgement, as a stopped process may continue right here
        while self._inbox:
            uid, observation, at = self._inbox.popleft()
            job = self._jobs.tracked.get(uid)
            if job is not None:
                job.observe(observation, at)
                if isinstance(observation, AgentConnected):
                    job.repeat_to.add(observation.host)

    async def _read_and_admit(self) -> None:
        """Take in what the API wrote, and admit jobs for which there is room."""
        self._lifecycle.note_starved(self._jobs.tracked.values(), self._clock())
        if self._failing_since is None:  # otherwise the next commit tells if the database is back
            with suppress(DatabaseUnavailable):
                await self._jobs.read_changes(self._now())
            for job in self._jobs.tracked.values():
                self._executor.inject_faults(job)
        if not self._is_draining:
            self._jobs.admit(self._now())
            return
        for job in self._jobs.admitted():
            if not job.snapshot.is_ending:
                job.observe(Interrupted(), self._now())

    async def _act(self) -> None:
        """Plan, commit and perform until nothing is due."""
        while self._clock() >= self._retry_at:
            for job in self._jobs.tracked.values():
                self._executor.repeat_requests(job)
            self._plan()
            drafts = self._drafts()
            most = max((draft.urgency for _, draft in drafts), default=Urgency.NONE)
            self._commit_due_at = self._committed_at + COMMIT_AFTER_SECONDS[most]
            if self._clock() < self._commit_due_at:
                return
            if not await self._commit(drafts):
                return
            # A successor on another machine has the cause, too, unless no copy can be reached.
            await self._writer.acknowledge()
            for job in list(self._jobs.tracked.values()):
                await self._jobs.keep_code(job)
                self._executor.perform(job)
                if job.is_over:
                    self._jobs.release(job)

    def _plan(self) -> bool:
        """Decide what is due; return whether a group round was announced before its commit."""
        # Heartbeats that came during the commit count before any rank is judged silent.
        self._fold_inbox()
        now, has_announced = self._now(), False
        for job in self._jobs.tracked.values():
            job.plan(now)
            prepare_starts(job)
            has_announced |= self._executor.announce(job)
        return has_announced

    def _drafts(self) -> list[tuple[TrackedJob, Draft]]:
        now = self._now()
        jobs = self._jobs.tracked.values()
        return [(job, job.draft(now)) for job in jobs if job.revision != job.written_revision]

    async def _commit(self, drafts: Sequence[tuple[TrackedJob, Draft]]) -> bool:
        """Write everything in one transaction; return whether it is durable."""
        writes = [draft.write for _, draft in drafts if draft.urgency is not Urgency.NONE]
        stamp("decided")
        try:
            await asyncio.to_thread(self._writer.commit, writes)
        except DatabaseUnavailable as error:
            self._note_failed_commit(error)
            return False
        self._failing_since = None
        self._committed_at = self._clock()
        for job, draft in drafts:
            for event in draft.write.events:
                job_id = job.snapshot.job_id
                _LOG.info(event.message, action=event.kind, job_id=job_id, rank=event.rank)
            job.mark_written(draft)
        return True

    async def _commit_at_end(self) -> None:
        """Write what is known: an agent repeats to our successor only the last of it."""
        while not await self._commit(self._drafts()):
            if self._is_database_wait_over():
                _LOG.warning("ends without writing its last events", action="events_lost")
                return
            _LOG.warning("waits for the database before it ends", action="handover_waits")
            await asyncio.sleep(RETRY_SECONDS)
            self._fold_inbox()

    def _note_failed_commit(self, error: DatabaseUnavailable) -> None:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
            _LOG.warning("the database is away", action="commit_failed", error=str(error))
        self._retry_at = now + RETRY_SECONDS
        if self._is_draining and self._is_database_wait_over():
            # The user wants an end. The rows say that the jobs run, as they do after a crash.
            for job in self._jobs.admitted():
                self._executor.dismiss(job)
            raise error

    def _is_database_wait_over(self) -> bool:
        """True if we were told to end and the database has been away for long enough since."""
        if self._failing_since is None:
            return False
        began = max(self._failing_since, self._told_to_end_at)
        return self._clock() >= began + self._database_wait_seconds

    def _now(self) -> Moment:
        return Moment(monotonic=self._clock(), wall=datetime.now(UTC))


def _is_routine(said: object) -> bool:
    """Return True if an observation may wait for the next round, at most `POLL_SECONDS` away.

    A thousand ranks send heartbeats at a thousand moments of a second, and none calls for a
    decision. They are folded in with the time they came, before any rank is judged.
    """
    is_beat = isinstance(said, Heartbeat) and not said.stopping
    return is_beat or isinstance(said, AgentHeartbeat | AgentStarved)
