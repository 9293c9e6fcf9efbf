"""Agents as jobs of a scheduler, which chooses the machine: one job of its own for each agent.

What a scheduler says and what an agent says are two facts. That a job has ended is evidence only
once its agent is not connected any more; see `AgentProcess.is_evidence`. A scheduler that does not
answer says nothing: its jobs count as running.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
import structlog

from coordinator.launchers.launcher import AgentProcess, NotStarted
from database.records import Job
from muster.contracts.job.engine import agent_job_name, agent_job_prefix, uid_in
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobUid
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.attach import HostProbed, JoinOrder
from muster.contracts.rank import ProcessRecord
from muster.contracts.views.service import EngineJob
from muster.runtime.stderr_messages import LastMessage

Result = TypeVar("Result")

FindJobs = Callable[[Collection[JobUid]], Mapping[JobUid, Job]]

LIST_SECONDS: Final = 1.0  # between two lists of jobs, while anything waits for one

LAST_PAUSE_SECONDS: Final = 15.0
"""Between two lists for an agent, after pauses that double: most failures are early ones, and its
connection tells sooner."""

UNLISTED_SECONDS: Final = 60.0
"""A job that was accepted is in a list by then. A controller that is killed forgets its newest."""

LIST_LIMIT_SECONDS: Final = 60.0  # for one list; a scheduler whose head is away hangs

_LOG: Final = structlog.get_logger("coordinator")


class SchedulerUnavailable(Exception):
    """The scheduler did not answer, or only with an error: nothing is known."""


class Refused(NotStarted):
    """The scheduler will never start such a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerJob:
    """What a scheduler says about the job of one agent."""

    id: str
    is_waiting: bool = False
    is_over: bool = False
    words: str = ""  # its state, for people


class Scheduler(Protocol):
    """The part that differs from one scheduler to another. All methods have a time limit."""

    name: str

    async def check(self) -> None:
        """Raise `NotStarted`, with what to do, if jobs cannot be submitted to it."""

    async def submit(self, name: str, order: JoinOrder, spec: JobSpec) -> None:
        """Submit a job that becomes an agent.

        Raises `Refused`, or `NotStarted` for any other failure that it reports, and
        `SchedulerUnavailable` if it may have been submitted.
        """

    async def jobs(self) -> Mapping[str, SchedulerJob]:
        """Return the jobs of this user by name, also those that have ended within minutes.

        Of several with a name the newest. Raises `SchedulerUnavailable`.
        """

    async def cancel(self, job_id: str) -> None:
        """End a job. Raises `SchedulerUnavailable`."""

    async def forget(self, job_id: str) -> None:
        """Remove what is left of a job that is over. Raises `SchedulerUnavailable`."""


class SchedulerJobs:
    """Lists the jobs of a scheduler, once for all who wait for its answer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._listing: asyncio.Task[Mapping[str, SchedulerJob]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._problem = LastMessage()
        self._woken = asyncio.Event()

    def start(self, work: Coroutine[object, object, Result]) -> asyncio.Task[Result]:
        """Start a task that `close` ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End all tasks, before the event loop does.

        It cancels all parts of asyncio's start of a command together, which then never ends.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def pause(self, seconds: float) -> None:
        """Wait, at most until an agent may have ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    def wake(self) -> None:
        """End all pauses: an agent has lost its connection."""
        self._woken.set()
        self._woken.clear()

    async def list_jobs(self) -> Mapping[str, SchedulerJob]:
        """Return a list that was begun after this call, at the earliest `LIST_SECONDS` later.

        Waits for a scheduler that is away.
        """
        while True:
            task = self._listing
            if task is None or task.done():
                task = self._listing = self.start(self._list())
            try:
                return await asyncio.shield(task)
            except SchedulerUnavailable as error:
                self.note(str(error))

    async def cancel(self, job_id: str) -> bool:
        """End a job, and return whether the scheduler has answered; the next list tells more."""
        try:
            await self.scheduler.cancel(job_id)
        except SchedulerUnavailable as error:
            self.note(str(error))
            return False
        return True

    async def forget(self, job_id: str) -> None:
        """Remove what is left of a job that is over, if the scheduler answers."""
        with suppress(SchedulerUnavailable):
            await self.scheduler.forget(job_id)

    async def _list(self) -> Mapping[str, SchedulerJob]:
        await asyncio.sleep(LIST_SECONDS)
        self._listing = None  # what is asked from now on needs a newer list
        try:
            async with asyncio.timeout(LIST_LIMIT_SECONDS):
                found = await self.scheduler.jobs()
        except TimeoutError as error:
            raise SchedulerUnavailable(f"no answer within {LIST_LIMIT_SECONDS:g} s") from error
        self._problem.text = None
        return found

    def note(self, problem: str) -> None:
        """Log a problem that is new since the scheduler last answered."""
        if self._problem.is_new(problem):
            words = f"{self.scheduler.name} does not answer: {problem}"
            _LOG.warning(words, action="engine_unavailable")


class SchedulerProbe:
    """Asks a scheduler whether it can be used, as `HostProbes` asks a host."""

    def __init__(self, jobs: SchedulerJobs, find_jobs: FindJobs) -> None:
        self._jobs = jobs
        self._find_jobs = find_jobs

    async def probe(self, shared: Path | None = None) -> HostProbed:  # noqa: ARG002
        await self._jobs.scheduler.check()
        return HostProbed()

    async def sweep(self, names: Collection[str]) -> list[EngineJob]:
        """Return what runs in our name for no job that is not over, and cancel those of `names`.

        Nothing else is cancelled: it may belong to another service. Raises `NotStarted`.
        """
        try:
            async with asyncio.timeout(LIST_LIMIT_SECONDS):
                listed = await self._jobs.list_jobs()
        except TimeoutError as error:
            name = self._jobs.scheduler.name
            raise NotStarted(f"{name} does not list its jobs: try again") from error
        uids = {name: JobUid(uid) for name in listed if (uid := uid_in(name))}
        # Read after the list: the row of a job is durable before anything is submitted for it.
        known = await asyncio.to_thread(self._find_jobs, {*uids.values()})
        left = []
        for name, uid in uids.items():
            job, owner = listed[name], known.get(uid)
            if job.is_over and owner is not None and owner.is_terminal:
                await self._jobs.forget(job.id)  # its coordinator was killed before it did
            if job.is_over or (owner is not None and not owner.is_terminal):
                continue
            if name not in names or not await self._jobs.cancel(job.id):
                job_id = None if owner is None else owner.job_id
                left.append(EngineJob(name=name, state=job.words, job_id=job_id))
        return left


class SchedulerLauncher:
    """The launcher of one agent (`Launcher`): of the present one of a job's host."""

    def __init__(
        self, jobs: SchedulerJobs, job_uid: str, host: str, agent_number: int, spec: JobSpec
    ) -> None:
        self._jobs = jobs
        self._uid = job_uid
        self._host = host
        self._agent_number = agent_number
        self._spec = spec
        self._name = agent_job_name(job_uid, host, agent_number)

    async def start(self, assignment: AgentAssignment) -> AgentProcess:
        order = msgspec.convert(assignment, JoinOrder, from_attributes=True)
        try:
            await self._jobs.scheduler.submit(self._name, order, self._spec)
        except SchedulerUnavailable as error:  # it may have been submitted: the next list tells
            self._jobs.note(str(error))
            return self._watched(f"was not started ({error})")
        missing = f"ended: {self._spec.engine} has taken its job and does not list it"
        return self._watched(missing, UNLISTED_SECONDS)

    # The following need no arguments: this is the launcher of one agent.

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:  # noqa: ARG002
        return self._watched()

    async def kill(self, agent: AgentProcess) -> None:  # noqa: ARG002
        job = (await self._jobs.list_jobs()).get(self._name)
        if job is not None and not job.is_over:
            await self._jobs.cancel(job.id)

    async def sweep(self, job_uid: str, known: Sequence[ProcessRecord]) -> None:  # noqa: ARG002
        while await self._end_up_to(self._agent_number, await self._jobs.list_jobs()):
            pass

    def living(self, records: Collection[ProcessRecord]) -> frozenset[ProcessRecord]:  # noqa: ARG002
        return frozenset()  # they end with the job of their agent

    def _watched(self, missing: str | None = None, patience_seconds: float = 0.0) -> AgentProcess:
        """Return the agent, whose job may be in no list for so long; then it is `missing`.

        Once a list had it, the next one without it is evidence of its end.
        """
        now = asyncio.get_running_loop().time

        async def watch() -> str | None:
            pause_seconds, listed_by, ending = LIST_SECONDS, now() + patience_seconds, missing
            while True:
                jobs = await self._jobs.list_jobs()
                # A coordinator that is gone may have submitted them while its successor listed.
                await self._end_up_to(self._agent_number - 1, jobs)
                job = jobs.get(self._name)
                if job is None and now() >= listed_by:
                    return ending
                if job is not None and job.is_over:
                    await self._jobs.forget(job.id)
                    return f"ended ({job.words})"
                if job is not None:
                    listed_by, ending = 0.0, None
                words = f"{self._spec.engine}, which has taken its job and does not list it"
                words = words if job is None else job.words
                is_waiting = job is None or job.is_waiting
                agent.waits = f"{self._host} waits for {words}" if is_waiting else None
                await self._jobs.pause(pause_seconds)
                pause_seconds = min(2 * pause_seconds, LAST_PAUSE_SECONDS)

        ended = self._jobs.start(watch())
        agent = AgentProcess(job_uid=self._uid, record=None, ended=ended, is_evidence=False)
        return agent

    async def _end_up_to(self, agent_number: int, jobs: Mapping[str, SchedulerJob]) -> bool:
        """End the host's jobs up to this agent's; return whether any was not over.

        One whose agent was given up may be over since: nothing else forgets it.
        """
        prefix = agent_job_prefix(self._uid, self._host)
        numbers = {name.removeprefix(prefix): job for name, job in jobs.items()}
        found = [job for n, job in numbers.items() if n.isdigit() and int(n) <= agent_number]
        for job in found:
            await (self._jobs.forget if job.is_over else self._jobs.cancel)(job.id)
        return not all(job.is_over for job in found)
