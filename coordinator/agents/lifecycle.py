"""The life of an agent: start it, wait for its end, clean up.

Each agent has one task here, which ends with `AgentLost`. By then the agent's process is over and
nothing that it started is left but the ranks that wait for the next agent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Final

from coordinator.agents.launching import AgentStarter
from coordinator.decide.actions import (
    AgentLost,
    AgentNotStarted,
    AgentStarved,
    AgentWaits,
    JobFailed,
    Observation,
)
from coordinator.decide.state.job import AGENT_FAILURES_LIMIT, JobSnapshot
from coordinator.decide.state.job_end import JobFailure
from coordinator.launchers.launcher import AgentProcess, Launcher, NotStarted
from coordinator.launchers.scheduler import Refused
from coordinator.preparation import Unprepared
from coordinator.tracked_job import TrackedJob
from database.records import AgentRecord
from muster.contracts.job.retry import describe_status
from muster.contracts.job.status import JobUid, Reason
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.environ import LATE_PULSES, agent_heartbeat_seconds
from muster.contracts.settings.paths import DataDir
from muster.host.processes import ProcessorWait
from muster.runtime.agent_sockets import newest_number

WAIT_SECONDS: Final = 1.0  # between two questions to a scheduler

DISMISSAL_SECONDS: Final = 5.0
"""A dismissed agent has nothing left to do; one that stays longer is killed."""


class AgentLifecycle:
    """The agents of this coordinator."""

    def __init__(self, starter: AgentStarter, holds_lease: Callable[[], Awaitable[bool]]) -> None:
        self.starter: Final = starter
        self._holds_lease = holds_lease
        self._data = DataDir(starter.settings.data_dir)
        self._tasks: set[asyncio.Task[None]] = set()
        self._cleaning: dict[str, asyncio.Task[None]] = {}
        """By job and host: hosts that were given up. No end of the service waits for them."""
        self._error: BaseException | None = None
        self.observe: Callable[[JobUid, Observation], None] = lambda _uid, _observation: None
        """Takes in what is observed of agents; the loop sets it."""

    @property
    def is_idle(self) -> bool:
        """True if no agent is left."""
        return not self._tasks

    def raise_error(self) -> None:
        """Raise the error of a task that could not do its work: the coordinator has to end."""
        if self._error is not None:
            raise self._error

    def start(self, job: TrackedJob, host: str) -> None:
        """Start the job's next agent on a host, which ends what is left there of the job."""
        clean = self._cleaning.pop(_task_name(job.snapshot.uid, host), None)
        is_unclean = clean is not None and clean.cancel()
        life = self._attend(job, host, self._launch, is_unclean=is_unclean)
        self._run(life, job.snapshot.uid, host)

    async def find(
        self, snapshot: JobSnapshot, rows: Sequence[AgentRecord]
    ) -> dict[str, AgentProcess]:
        """Return the agents that the previous coordinator started for a job and that may live."""
        records = {row.host: row.process for row in rows}
        known = {**snapshot.hosts, **snapshot.agents}.values()
        hosts = [agent.host for agent in known if agent.is_local or agent.host in records]
        launcher = self.starter.launcher
        adopted = (
            launcher(snapshot, host).adopt(snapshot.uid, records.get(host)) for host in hosts
        )
        found = zip(hosts, await asyncio.gather(*adopted), strict=True)
        return {host: process for host, process in found if process is not None}

    async def adopt(self, job: TrackedJob) -> None:
        """Watch the agents that were found."""
        await self.starter.adopt(job)
        for host in job.agents:
            self._run(self._attend(job, host, self._wait_for_end), job.snapshot.uid, host)

    def kill(self, job: TrackedJob, host: str) -> None:
        """Kill an agent; its task cleans up."""
        if host in job.agents:
            kill = self.starter.launcher(job.snapshot, host).kill(job.agents[host])
            self._run(kill, job.snapshot.uid, host)

    def give_up(self, job: TrackedJob, host: str) -> None:
        """Forget the agent of a host that does not answer, and clean the host once it does.

        An agent that lives is dismissed when it connects, but it may have died: then nothing else
        there ends a program that sends no heartbeats.
        """
        _set_agent(job, host, None)
        name = _task_name(job.snapshot.uid, host)
        for task in self._tasks:
            if task.get_name() == name:
                task.cancel()  # and with it the watch that it waits for
        self._clean(job, host)

    def dismiss(self, job: TrackedJob, host: str) -> None:
        """Make sure that a dismissed agent ends, or is never started.

        Killing it at once would save the time of its imports, but could orphan what it is starting.
        """
        if host in job.agents:  # otherwise `AgentStarter.start` finds it dismissed
            launcher = self.starter.launcher(job.snapshot, host)
            self._run(_kill_if_it_stays(job.agents[host], launcher), job.snapshot.uid, host)

    def note_starved(self, jobs: Iterable[TrackedJob], now: float) -> None:
        """Observe for how long agents of this host that are late have got no processor."""
        for job in jobs:
            late_seconds = LATE_PULSES * agent_heartbeat_seconds(job.snapshot.spec)
            for host, process in job.agents.items():
                agent = job.snapshot.agents[host]
                is_late = now >= agent.seen_at + late_seconds or agent.starved_seconds > 0
                if not (is_late and agent.is_local and process.record):
                    process.processor_wait = None
                    continue
                wait = process.processor_wait or ProcessorWait(process.record.pid)
                process.processor_wait = wait
                starved = AgentStarved(
                    host=host, agent_number=agent.agent_number, seconds=wait.seconds
                )
                self.observe(job.snapshot.uid, starved)

    async def sweep(self, leftovers: Mapping[JobUid, Sequence[ProcessRecord]]) -> None:
        """End every process of these jobs here, including the given known ones."""
        await asyncio.gather(
            *(self.starter.local.sweep(uid, known) for uid, known in leftovers.items())
        )

    def ask_schedulers(self) -> None:
        """Ask the schedulers now: an agent has lost its connection."""
        for jobs in self.starter.schedulers.values():
            jobs.wake()

    async def detach(self) -> None:
        """Stop watching; the agents run on."""
        tasks = [*self._tasks, *self._cleaning.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for jobs in self.starter.schedulers.values():
            await jobs.close()

    # The life of one agent

    async def _attend(
        self,
        job: TrackedJob,
        host: str,
        serve: Callable[[TrackedJob, str], Awaitable[str]],
        *,
        is_unclean: bool = False,
    ) -> None:
        """Run one agent's life; `serve` returns when it has ended, with a sentence how.

        An `is_unclean` host was given up: what it has of the job is ended by this agent, or later.
        """
        uid, agent = job.snapshot.uid, job.snapshot.agents[host]
        number, launcher = agent.agent_number, self.starter.launcher(job.snapshot, host)
        name, is_swept = job.snapshot.agent_name(host), False
        kind = AgentLost
        try:
            message = await serve(job, host)
        except Unprepared as error:
            self.observe(uid, JobFailed(failure=error.failure))
            if any(rank.is_alive for rank in job.snapshot.ranks_on(host)):
                await launcher.sweep(uid, job.known_processes(host))
                self._report_ends(job, host, frozenset())
            message = f"{name} was not started again, and its ranks were ended"
            self.observe(uid, AgentLost(host=host, agent_number=number, message=message))
            return
        except NotStarted as error:
            self._fail_if_refused(job, error)
            kind = AgentLost if isinstance(error, Refused) else AgentNotStarted
            message = f"{name} could not be started: {error}"
            # A host that is out of reach, and has nothing of the job, has nothing to sweep.
            is_swept = not any(rank.is_alive for rank in job.snapshot.ranks_on(host))
            if is_unclean:
                self._clean(job, host)
        except Exception as error:  # noqa: BLE001  any failure to start counts as a lost agent
            message = f"{name} could not be started: {error!r}"
        if not await self._holds_lease():
            return  # the processes belong to the coordinator that took over
        if job.snapshot.agents[host].agent_number != number:
            return  # it was dismissed or given up: the next agent is there, and has ended its rest
        _set_agent(job, host, None)
        # Listed before the sweep: the next agent finds a rank that ends after that.
        living = self._adoptable_ranks(job.snapshot, host)
        if not living and not is_swept:
            await launcher.sweep(uid, job.known_processes(host))
        self._report_ends(job, host, living)
        socket = self._data.job(job.snapshot.job_id).agent_socket(number)
        newest = newest_number(socket) if agent.is_local else 0
        lost = kind(host=host, agent_number=number, message=message, living=living, newest=newest)
        self.observe(uid, lost)

    def _fail_if_refused(self, job: TrackedJob, error: NotStarted) -> None:
        """End a job that a scheduler will not take: nothing of it is lost before its first rank."""
        if isinstance(error, Refused) and not (job.snapshot.next_attempt or job.agents):
            words = f"{job.snapshot.spec.engine} does not take the job: {error}"
            failure = JobFailure(reason=Reason.ENGINE_REFUSED, message=words)
            self.observe(job.snapshot.uid, JobFailed(failure=failure))

    async def _launch(self, job: TrackedJob, host: str) -> str:
        """Start the agent and return how it ended; it may be dismissed at any time."""
        agent = await self.starter.start(job, host, self.observe)
        if agent is None:
            return f"{job.snapshot.agent_name(host)} was dismissed before it was started"
        _set_agent(job, host, agent)
        if not job.snapshot.agents[host].is_wanted:  # dismissed while it was being started
            self.dismiss(job, host)
        return await self._wait_for_end(job, host)

    async def _wait_for_end(self, job: TrackedJob, host: str) -> str:
        agent = job.agents[host]
        if agent.is_evidence:
            status: int | str | None = await agent.ended
        else:
            status = await self._wait_for_scheduler(job, host, agent)
        ending = describe_status(status) if isinstance(status, int) else status or "ended"
        return f"{job.snapshot.agent_name(host)} {ending}; another one is started"

    async def _wait_for_scheduler(
        self, job: TrackedJob, host: str, agent: AgentProcess
    ) -> int | str | None:
        """Return how an agent has ended; report meanwhile why its scheduler has not started it."""
        started = job.snapshot.agents[host]
        try:
            while not (await asyncio.wait([agent.ended], timeout=WAIT_SECONDS))[0]:
                if why := agent.waits:
                    waits = AgentWaits(host=host, agent_number=started.agent_number, message=why)
                    self.observe(job.snapshot.uid, waits)
            while job.is_connected(host, started.agent_number):  # noqa: ASYNC110
                await asyncio.sleep(WAIT_SECONDS)
            return await agent.ended
        finally:
            agent.ended.cancel()  # the host was given up, or we end

    # What it leaves

    def _report_ends(self, job: TrackedJob, host: str, living: frozenset[int]) -> None:
        if not job.snapshot.agents[host].is_local:
            return  # the records are on the disk of that host, and its next agent reports them
        # The next agent reports those of the living.
        ranks = (rank for rank in job.snapshot.ranks_on(host) if rank.rank not in living)
        for end in job.unreported_ends(self._data.job(job.snapshot.job_id), ranks):
            self.observe(job.snapshot.uid, end)

    def _adoptable_ranks(self, snapshot: JobSnapshot, host: str) -> frozenset[int]:
        """Return the ranks that may run on without their agent and wait for the next one."""
        # Ranks of a failed job wait, too: they are saving within its grace period.
        agent = snapshot.agents[host]
        if not agent.is_wanted or agent.failures >= AGENT_FAILURES_LIMIT:
            return frozenset()
        # A rank whose kill the agent did not carry out is swept, or killed by the next agent.
        waiting = {
            rank.attempt.identity: rank.rank
            for rank in snapshot.ranks_on(host)
            if rank.is_alive and not rank.attempt.intent.kill and rank.attempt.identity
        }
        living = self.starter.launcher(snapshot, host).living(waiting.keys())
        return frozenset(waiting[process] for process in living)

    def _clean(self, job: TrackedJob, host: str) -> None:
        """End what a host has of a job, once it answers; the next start there replaces this."""
        uid = job.snapshot.uid
        sweep = self.starter.launcher(job.snapshot, host).sweep(uid, job.known_processes(host))
        clean = asyncio.get_running_loop().create_task(sweep)
        self._cleaning[_task_name(uid, host)] = clean

    # Tasks

    def _run(self, work: Coroutine[object, object, None], uid: JobUid, host: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=_task_name(uid, host))
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._error = self._error or task.exception()


def _task_name(uid: JobUid, host: str) -> str:
    return f"{uid}/{host}"


async def _kill_if_it_stays(agent: AgentProcess, launcher: Launcher) -> None:
    while not (await asyncio.wait([agent.ended], timeout=DISMISSAL_SECONDS))[0]:
        await launcher.kill(agent)


def _set_agent(job: TrackedJob, host: str, agent: AgentProcess | None) -> None:
    """Note which agent runs on a host; None: none does any more."""
    job.agents.pop(host, None)
    if agent is not None:
        job.agents[host] = agent
    records = {host: known.record for host, known in job.agents.items() if known.record is not None}
    job.attach(agents=records)
