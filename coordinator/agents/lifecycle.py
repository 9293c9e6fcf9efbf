"""The life of an agent: prepare the job, start the agent, wait for its end, clean up.

Each agent has one task here, which ends with `AgentLost`. By then the agent's process is over and
nothing that it started is left but the ranks that wait for the next agent.
"""

import asyncio
import secrets
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from coordinator.decide.actions import (
    AgentLost,
    AgentNotStarted,
    AgentStarved,
    AgentWaits,
    CodeTaken,
    JobFailed,
    Observation,
)
from coordinator.decide.state.job import AGENT_FAILURES_LIMIT, AgentSnapshot, JobSnapshot
from coordinator.decide.state.job_end import JobFailure
from coordinator.launchers.launcher import AgentProcess, AgentValues, Launcher, NotStarted
from coordinator.launchers.remote import probe_file
from coordinator.launchers.scheduler import Refused, SchedulerJobs, SchedulerLauncher
from coordinator.preparation import Unprepared, agent_assignment, choose_kernels, prepare
from coordinator.tracked_job import TrackedJob
from database.records import AgentRecord
from muster.contracts.host import HostFacts
from muster.contracts.interpreter import is_compatible, release
from muster.contracts.job.retry import describe_status
from muster.contracts.job.status import JobUid, Reason
from muster.contracts.messages.agent import JoinRequest
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.attach import LaunchAgent, OrderFailed
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.environ import LATE_PULSES, agent_heartbeat_seconds
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.contracts.token import sha256_of
from muster.host.code import Script, read_code
from muster.host.ports import group_port
from muster.host.processes import ProcessorWait
from muster.host.trace import stamp
from muster.job_defaults import ResolvedSpec
from muster.runtime.agent_sockets import newest_number
from muster.runtime.archive import claim_directory

WAIT_SECONDS: Final = 1.0  # between looks at what a scheduler has said

DISMISSAL_SECONDS: Final = 5.0
"""A dismissed agent has nothing left to do; one that stays longer is killed."""


class AgentLifecycle:
    """The agents of this coordinator."""

    def __init__(  # noqa: PLR0913  it creates nothing itself
        self,
        local: Launcher,
        launchers: Mapping[str, Launcher],
        settings: ServiceSettings,
        holds_lease: Callable[[], Awaitable[bool]],
        facts: Callable[[], Awaitable[Mapping[str, HostFacts]]] | None = None,
        *,
        schedulers: Mapping[str, SchedulerJobs] = MappingProxyType({}),
        values: AgentValues | None = None,
        usable_vram_mb: Mapping[str, dict[str, int]] = MappingProxyType({}),  # by host and GPU
    ) -> None:
        """`launchers` are those of other hosts; `facts` returns what hosts have said, by name.

        `schedulers` are by engine; agents that they start get `values`.
        """
        self._schedulers = schedulers
        self._values = values or AgentValues({})
        self._joined: dict[tuple[str, str, int], bytes] = {}
        """By agent, who has used its token: a scheduler without memory may start a job twice."""
        self._local = local
        self._launchers = launchers
        self._settings = settings
        self._holds_lease = holds_lease
        self._facts = facts
        self._usable_vram_mb = usable_vram_mb
        self._data = DataDir(settings.data_dir)
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

    def prepare(self, job: TrackedJob) -> None:
        """Give agents that are about to start their tokens, and ranks that meet anew a free port.

        Both are committed together with the decision, so no two ranks get different ports.
        """
        for host in job.starting_agents:
            token = job.tokens[host] = secrets.token_urlsafe(32)
            digests = {**job.attachment.tokens_sha256, host: sha256_of(token)}
            job.attach(tokens_sha256=digests)
        if job.needs_new_port:
            job.attach(master_port=group_port(job.attachment.master_port))

    def start(self, job: TrackedJob, host: str) -> None:
        """Start the job's next agent on a host, which ends what is left there of the job."""
        clean = self._cleaning.pop(_task_name(job.snapshot.uid, host), None)
        is_unclean = clean is not None and not clean.done()
        if clean is not None:
            clean.cancel()
        life = self._attend(job, host, self._launch, is_unclean=is_unclean)
        self._run(life, job.snapshot.uid, host)

    async def find(
        self, snapshot: JobSnapshot, rows: Sequence[AgentRecord]
    ) -> dict[str, AgentProcess]:
        """Return the agents that the previous coordinator started for a job and that may live."""
        records = {row.host: row.process for row in rows}
        known = {**snapshot.hosts, **snapshot.agents}.values()
        hosts = [it for it in known if it.is_local or it.host in records]
        looks = (
            self._launcher(snapshot, it).adopt(snapshot.uid, records.get(it.host)) for it in hosts
        )
        found = zip(hosts, await asyncio.gather(*looks), strict=True)
        return {it.host: agent for it, agent in found if agent is not None}

    async def adopt(self, job: TrackedJob) -> None:
        """Watch the agents that were found."""
        try:
            job.places = await self._prepare(job)
        except Unprepared as error:
            self.observe(job.snapshot.uid, JobFailed(failure=error.failure))
        for host in job.agents:
            self._run(self._attend(job, host, self._wait_for_end), job.snapshot.uid, host)

    def kill(self, job: TrackedJob, host: str) -> None:
        """Kill an agent; its task cleans up."""
        if host in job.agents:
            kill = self._launcher_of(job, host).kill(job.agents[host])
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

    def _clean(self, job: TrackedJob, host: str) -> None:
        """End what a host has of a job, once it answers; the next start there replaces this."""
        uid = job.snapshot.uid
        sweep = self._launcher_of(job, host).sweep(uid, job.known_processes(host))
        clean = asyncio.get_running_loop().create_task(sweep)
        self._cleaning[_task_name(uid, host)] = clean

    def dismiss(self, job: TrackedJob, host: str) -> None:
        """Make sure that a dismissed agent ends, or is never started.

        Killing it at once would save the time of its imports, but could orphan what it is starting.
        """
        if host in job.agents:  # otherwise `_launch` finds it dismissed
            end = self._kill_if_it_stays(job.agents[host], self._launcher_of(job, host))
            self._run(end, job.snapshot.uid, host)

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
        await asyncio.gather(*(self._local.sweep(uid, known) for uid, known in leftovers.items()))

    async def detach(self) -> None:
        """Stop watching; the agents run on."""
        tasks = [*self._tasks, *self._cleaning.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for jobs in self._schedulers.values():
            await jobs.close()

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
        number, launcher = agent.agent_number, self._launcher(job.snapshot, agent)
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
        # Look before sweeping: a rank that ends after this look is found by the next agent.
        living = self._adoptable_ranks(job.snapshot, host)
        if not living and not is_swept:
            await launcher.sweep(uid, job.known_processes(host))
        self._report_ends(job, host, living)
        newest = 0
        if agent.is_local:
            newest = newest_number(self._data.job(job.snapshot.job_id).agent_socket(number))
        lost = kind(host=host, agent_number=number, message=message, living=living, newest=newest)
        self.observe(uid, lost)

    def _fail_if_refused(self, job: TrackedJob, error: NotStarted) -> None:
        """End a job that a scheduler will not take: nothing of it is lost before its first rank."""
        if isinstance(error, Refused) and not (job.snapshot.next_attempt or job.agents):
            words = f"{job.snapshot.spec.engine} does not take the job: {error}"
            failure = JobFailure(reason=Reason.ENGINE_REFUSED, message=words)
            self.observe(job.snapshot.uid, JobFailed(failure=failure))

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
        return frozenset(
            waiting[it] for it in self._launcher(snapshot, agent).living(waiting.keys())
        )

    async def _launch(self, job: TrackedJob, host: str) -> str:
        """Prepare the job, start the agent, and return how it ended.

        The agent may be dismissed at any time, also before it is started.
        """
        if job.places is None or not job.snapshot.any_alive:  # living ranks have their places
            job.places = await self._prepare(job)
        if self._facts is not None:
            await choose_kernels(job, self._facts)
        if _is_wanted(job, host):
            files = self._data.job(job.snapshot.job_id)
            await asyncio.to_thread(claim_directory, files, job.snapshot.uid)
            if job.takes_code:
                await self._take_code(job, job.places.script)
        if not _is_wanted(job, host):
            return f"{job.snapshot.agent_name(host)} was dismissed before it was started"
        stamp("agent launched", job=job.snapshot.uid)
        agent = await self._launcher_of(job, host).start(self._assignment(job, host))
        _set_agent(job, host, agent)
        if not _is_wanted(job, host):  # dismissed while it was being started
            self.dismiss(job, host)
        return await self._wait_for_end(job, host)

    async def _wait_for_end(self, job: TrackedJob, host: str) -> str:
        agent, status = job.agents.get(host), None
        if agent is not None and agent.is_evidence:
            status = await agent.ended
        elif agent is not None:
            status = await self._wait_for_scheduler(job, host, agent)
        ending = "ended" if status is None else status
        if isinstance(ending, int):
            ending = describe_status(ending)
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
            while _is_connected(job, started):  # noqa: ASYNC110
                await asyncio.sleep(WAIT_SECONDS)
            return await agent.ended
        finally:
            agent.ended.cancel()  # the host was given up, or we end

    @asynccontextmanager
    async def joining(
        self, job: TrackedJob | None, request: JoinRequest
    ) -> AsyncIterator[LaunchAgent | OrderFailed]:
        """Yield the answer to the parent of an agent of this job; None: of no job.

        A probe file lies in its directory of checkpoints until the caller is done.
        """
        if job is None or job.places is None or _is_connected(job, request):
            yield OrderFailed(message="no such agent is expected: its job has ended, or moved on")
            return
        if why := self._refusal(request):
            job.note("agent_refused", f"{why}; it was turned away")
            yield OrderFailed(message=why)
            return
        assignment = self._assignment(job, request.host)
        joined = msgspec.structs.replace(assignment, token=request.token, is_joined=True)
        secrets_dir = Path(assignment.secrets_dir)
        complete = await asyncio.to_thread(self._values.complete, joined, secrets_dir)
        async with probe_file(assignment.checkpoint_dir) as probe:
            yield LaunchAgent(assignment=complete, environment=self._values.given, probe=probe)

    def _refusal(self, request: JoinRequest) -> str:
        """Return why a process is turned away, "" if it is not: each token is good for one."""
        if not is_compatible(request.version, request.protocol):
            theirs = f"{request.node} has Muster {release(request.version, request.protocol)}"
            return f"{theirs}, and the coordinator {release()}: install that there"
        key = request.job_uid, request.host, request.agent_number
        if self._joined.setdefault(key, request.nonce) != request.nonce:
            return f"{request.node} has shown the token of {request.host}, which was used before"
        return ""

    def look_again(self) -> None:
        """Ask the schedulers now: an agent has lost its connection."""
        for jobs in self._schedulers.values():
            jobs.wake()

    def _assignment(self, job: TrackedJob, host: str) -> AgentAssignment:
        return agent_assignment(job, host, self._settings, self._usable_vram_mb.get(host, {}))

    async def _prepare(self, job: TrackedJob) -> ResolvedSpec:
        return await asyncio.to_thread(prepare, job.snapshot.spec, self._settings)

    async def _take_code(self, job: TrackedJob, script: Script | None) -> None:
        job.takes_code = False
        code = await asyncio.to_thread(read_code, script)
        taken = CodeTaken(files=code, script=script.file if script else "")
        self.observe(job.snapshot.uid, taken)
        if script and (earlier := job.snapshot.spec.earlier):
            job.note("code_taken", f"goes on from job {earlier.job} with the code as it is now")

    async def _kill_if_it_stays(self, agent: AgentProcess, launcher: Launcher) -> None:
        while not (await asyncio.wait([agent.ended], timeout=DISMISSAL_SECONDS))[0]:
            await launcher.kill(agent)

    def _launcher_of(self, job: TrackedJob, host: str) -> Launcher:
        return self._launcher(job.snapshot, job.snapshot.agents[host])

    def _launcher(self, snapshot: JobSnapshot, agent: AgentSnapshot) -> Launcher:
        if snapshot.is_scheduled:
            jobs = self._schedulers[snapshot.spec.engine or ""]
            return SchedulerLauncher(
                jobs, snapshot.uid, agent.host, agent.agent_number, snapshot.spec
            )
        return self._local if agent.is_local else self._launchers[agent.host]

    def _run(self, work: Coroutine[object, object, None], uid: JobUid, host: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=_task_name(uid, host))
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._error = self._error or task.exception()


def _is_connected(job: TrackedJob, which: AgentSnapshot | JoinRequest) -> bool:
    """True if this agent is connected."""
    agent = job.snapshot.agents[which.host]
    return agent.agent_number == which.agent_number and agent.is_connected


def _task_name(uid: JobUid, host: str) -> str:
    return f"{uid}/{host}"


def _is_wanted(job: TrackedJob, host: str) -> bool:
    """Return False if the agent that is being started was dismissed meanwhile."""
    return job.snapshot.agents[host].is_wanted


def _set_agent(job: TrackedJob, host: str, agent: AgentProcess | None) -> None:
    """Note which agent runs on a host; None: none does any more."""
    job.agents.pop(host, None)
    if agent is not None:
        job.agents[host] = agent
    records = {host: it.record for host, it in job.agents.items() if it.record is not None}
    job.attach(agents=records)
