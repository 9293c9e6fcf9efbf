"""The life of an agent: prepare the job, start the agent, wait for its end, clean up.

Each agent has one task here, which ends with `AgentLost`. By then the agent's process is over and
nothing that it started is left but the ranks that wait for the next agent.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from coordinator.decide.actions import AgentLost, JobFailed, Observation, StartAgent
from coordinator.decide.state import AGENT_FAILURES_LIMIT, JobFailure, JobSnapshot
from coordinator.jobs import TrackedJob
from coordinator.launcher import AgentProcess, Launcher
from database.records import Job
from muster.contracts.environ import agent_heartbeat_seconds, process_tag
from muster.contracts.job import JobUid, Reason
from muster.contracts.location import InvalidLocation
from muster.contracts.messages import AdoptedRank, AgentAssignment
from muster.contracts.paths import DataDir
from muster.contracts.rank import ProcessRecord
from muster.contracts.retry import describe_status
from muster.contracts.settings import ServiceSettings
from muster.contracts.spec import JobSpec
from muster.contracts.token import sha256_of
from muster.datasets.errors import DatasetError
from muster.datasets.sources import open_source
from muster.datasets.synthetic import ensure_synthetic
from muster.host.ports import group_port
from muster.host.processes import is_running
from muster.host.trace import stamp
from muster.job_defaults import Completed, complete
from muster.objects.errors import ObjectStoreError
from muster.runtime.agent_sockets import newest_generation
from muster.runtime.archive import claim_directory

DISMISSAL_SECONDS: Final = 5.0
"""A dismissed agent has nothing left to do; one that stays longer is killed."""

Observe = Callable[[JobUid, Observation], None]


class Unprepared(Exception):
    """The job cannot run."""

    def __init__(self, failure: JobFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class AgentLifecycle:
    """The agents of this coordinator."""

    def __init__(
        self,
        launcher: Launcher,
        settings: ServiceSettings,
        holds_lease: Callable[[], Awaitable[bool]],
    ) -> None:
        self._launcher = launcher
        self._settings = settings
        self._holds_lease = holds_lease
        self._data = DataDir(settings.data_dir)
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """True if no agent is left."""
        return not self._tasks

    def raise_error(self) -> None:
        """Raise the error of a task that could not do its work: the coordinator has to end."""
        if self._error is not None:
            raise self._error

    def equip(self, job: TrackedJob) -> None:
        """Give an agent that is about to start its token, and ranks that meet anew a free port.

        Both are committed together with the decision, so no two ranks get different ports.
        """
        if StartAgent() in job.decided:
            job.token = secrets.token_urlsafe(32)
            job.attach(agent=None, agent_token_sha256=sha256_of(job.token))
        if job.needs_new_port:
            job.attach(master_port=group_port(job.attachment.master_port))

    def start(self, job: TrackedJob, observe: Observe) -> None:
        """Start the job's next agent."""
        self._run(self._attend(job, observe, self._launch))

    async def find(self, row: Job) -> AgentProcess | None:
        """Return the agent that the previous coordinator started for a job, if it lives."""
        return await self._launcher.adopt(row.uid, row.agent)

    async def adopt(self, job: TrackedJob, observe: Observe) -> None:
        """Watch an agent that was found."""
        try:
            job.places = await self._prepare(job)
        except Unprepared as error:
            observe(job.snapshot.uid, JobFailed(failure=error.failure))
        self._run(self._attend(job, observe, self._wait_for_end))

    def kill(self, job: TrackedJob) -> None:
        """Kill the agent; its task cleans up."""
        if job.agent is not None:
            self._run(self._launcher.kill(job.agent))

    def dismiss(self, job: TrackedJob) -> None:
        """Make sure that a dismissed agent ends, or is never started.

        Killing it at once would save the time of its imports, but could orphan what it is starting.
        """
        if job.agent is not None:  # otherwise `_launch` finds it dismissed
            self._run(self._kill_if_it_stays(job.agent))

    async def sweep(self, leftovers: Mapping[JobUid, Sequence[ProcessRecord]]) -> None:
        """End every process of these jobs, including the given known ones."""
        await asyncio.gather(
            *(self._launcher.sweep(uid, known) for uid, known in leftovers.items())
        )

    async def detach(self) -> None:
        """Stop watching; the agents run on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _attend(
        self, job: TrackedJob, observe: Observe, serve: Callable[[TrackedJob], Awaitable[str]]
    ) -> None:
        """Run one agent's life; `serve` returns when it has ended, with a sentence how."""
        uid, generation = job.snapshot.uid, job.snapshot.generation
        try:
            message = await serve(job)
        except Unprepared as error:
            observe(uid, JobFailed(failure=error.failure))
            if job.snapshot.any_alive:
                await self._launcher.sweep(uid, job.known_processes())
                self._report_ends(job, observe, frozenset())
            message = "the job's agent was not started again, and its ranks were ended"
            observe(uid, AgentLost(generation=generation, message=message))
            return
        except Exception as error:  # noqa: BLE001  any failure to start counts as a lost agent
            message = f"the job's agent could not be started: {error!r}"
        await self._clean_up(job, observe, generation, message)

    async def _clean_up(
        self, job: TrackedJob, observe: Observe, generation: int, message: str
    ) -> None:
        """Report the agent as lost, once it is known which of its ranks live."""
        if not await self._holds_lease():
            return  # the processes belong to the coordinator that took over
        uid = job.snapshot.uid
        job.agent = None
        job.attach(agent=None)
        # Look before sweeping: a rank that ends after this look is found by the next agent.
        living = _adoptable_ranks(job.snapshot)
        if not living:
            await self._launcher.sweep(uid, job.known_processes())
        self._report_ends(job, observe, living)
        newest = newest_generation(self._data.job(job.snapshot.job_id).agent_socket(generation))
        lost = AgentLost(generation=generation, message=message, living=living, newest=newest)
        observe(uid, lost)

    def _report_ends(self, job: TrackedJob, observe: Observe, living: frozenset[int]) -> None:
        for end in job.unreported_ends(self._data.job(job.snapshot.job_id), living):
            observe(job.snapshot.uid, end)

    async def _launch(self, job: TrackedJob) -> str:
        """Prepare the job, start the agent, and return how it ended.

        The agent may be dismissed at any time, also before it is started.
        """
        if job.places is None or not job.snapshot.any_alive:  # living ranks have their places
            job.places = await self._prepare(job)
        if _is_wanted(job):
            files = self._data.job(job.snapshot.job_id)
            await asyncio.to_thread(claim_directory, files, job.snapshot.uid)
        if not _is_wanted(job):
            return "the job's agent was dismissed before it was started"
        stamp("agent launched", job=job.snapshot.uid)
        agent = await self._launcher.start(self._assignment(job))
        job.agent = agent
        job.attach(agent=agent.record)
        if not _is_wanted(job):  # dismissed while it was being started
            self.dismiss(job)
        return await self._wait_for_end(job)

    async def _wait_for_end(self, job: TrackedJob) -> str:
        status = None if job.agent is None else await job.agent.ended
        ending = "ended" if status is None else describe_status(status)
        return f"the job's agent {ending}; another one is started"

    async def _prepare(self, job: TrackedJob) -> Completed:
        return await asyncio.to_thread(prepare, job.snapshot.spec, self._settings)

    async def _kill_if_it_stays(self, agent: AgentProcess) -> None:
        while not (await asyncio.wait([agent.ended], timeout=DISMISSAL_SECONDS))[0]:
            await self._launcher.kill(agent)

    def _assignment(self, job: TrackedJob) -> AgentAssignment:
        snapshot = job.snapshot
        return AgentAssignment(
            job_uid=snapshot.uid,
            generation=snapshot.generation,
            token=job.token,
            job_root=str(self._data.job(snapshot.job_id).root),
            address_file=str(self._data.coordinator_address),
            # Ranks are forked from the prefork server unless the user's variables may change how
            # Python or numpy start, or the next agent has to read secrets from the environment of
            # a process, where the kernel does not show those of a fork.
            is_managed=snapshot.spec.command is None
            and not snapshot.spec.env
            and not snapshot.spec.secrets,
            orphan_timeout_seconds=self._settings.orphan_timeout_seconds,
            stop_grace_seconds=snapshot.spec.stop_grace_seconds,
            python=snapshot.spec.python,
            agent_heartbeat_seconds=agent_heartbeat_seconds(snapshot.spec),
            max_log_bytes=snapshot.spec.max_log_bytes,
            spare_ranks=snapshot.spec.spare_ranks
            if snapshot.is_synchronous and not snapshot.spec.gpus_per_rank
            else 0,
            gpus_per_rank=snapshot.spec.gpus_per_rank,
            gpus_at_once=snapshot.spec.gpus_per_rank
            * (snapshot.spec.world_size if snapshot.is_gang else 1),
            secrets=snapshot.spec.secrets,
            secrets_dir=str(self._data.secrets),
            # The launcher adds the keys.
            store_keys={} if job.places is not None and job.places.uses_store else None,
            adopted=tuple(
                AdoptedRank(
                    rank=rank.rank,
                    incarnation=rank.attempt,
                    process=rank.identity,
                    process_tag=process_tag(snapshot.uid, rank.rank, rank.attempt),
                )
                for rank in snapshot.ranks
                if rank.is_alive and rank.identity is not None
            ),
        )

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._error = self._error or task.exception()


def _is_wanted(job: TrackedJob) -> bool:
    """Return False if the agent that is being started was dismissed meanwhile."""
    return job.snapshot.has_agent


def prepare(spec: JobSpec, settings: ServiceSettings) -> Completed:
    """Return the job with its directories; create the synthetic data set if it trains on that.

    Blocks on the disk. Missing data or a missing directory fails the job here, with a sentence, and
    not fifty times in a rank. Raises `Unprepared`.
    """
    try:
        # Jobs that an earlier version has stored are not complete yet.
        completed = complete(spec, settings, Path.cwd())
        if spec.command is None:  # a command knows itself which data it needs
            if completed.dataset_dir == DataDir(settings.data_dir).synthetic_dataset:
                ensure_synthetic(completed.dataset_dir)
            elif isinstance(completed.dataset_dir, Path):
                open_source(completed.dataset_dir)
            # A store that is away must fail no job that trains: the ranks ask for it themselves.
    except (DatasetError, ObjectStoreError, InvalidLocation) as error:
        raise Unprepared(JobFailure(reason=Reason.INVALID_DATASET, message=str(error))) from error
    is_directory = False
    with suppress(OSError):  # the name is too long, or a parent must not be searched
        is_directory = completed.working_dir.is_dir()
    if not is_directory:
        message = f"the working directory {completed.working_dir} does not exist: create it first"
        raise Unprepared(JobFailure(reason=Reason.INVALID_PROGRAM, message=message))
    return completed


def _adoptable_ranks(snapshot: JobSnapshot) -> frozenset[int]:
    """Return the ranks that run on without their agent and wait for the next one."""
    # Ranks of a failed job wait, too: they are saving within its grace period.
    if not snapshot.has_agent or snapshot.agent_failures >= AGENT_FAILURES_LIMIT:
        return frozenset()
    return frozenset(
        rank.rank
        for rank in snapshot.ranks
        # A rank whose kill the agent did not carry out is swept, or killed by the next agent.
        if rank.kill is None and rank.identity is not None and is_running(rank.identity)
    )
