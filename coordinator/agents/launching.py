"""How an agent comes to run: its job is prepared, then a launcher starts it.

A scheduler starts a process on a machine of its choice, which asks to join and becomes the agent's
parent.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from coordinator.decide.actions import CodeTaken, Observation, StartAgent
from coordinator.decide.state.job import JobSnapshot
from coordinator.launchers.launcher import AgentProcess, AgentValues, Launcher, NotStarted
from coordinator.launchers.remote import probe_file
from coordinator.launchers.scheduler import SchedulerJobs, SchedulerLauncher
from coordinator.preparation import Unprepared, agent_assignment, choose_kernels, prepare
from coordinator.tracked_job import TrackedJob
from muster.contracts.host import HostFacts
from muster.contracts.interpreter import is_compatible, release
from muster.contracts.job.status import JobUid
from muster.contracts.messages.agent import JoinRequest
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.attach import LaunchAgent, OrderFailed
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.contracts.token import sha256_of
from muster.host.code import Script, read_code
from muster.host.ports import group_port
from muster.host.trace import stamp
from muster.runtime.archive import claim_directory


def prepare_starts(job: TrackedJob) -> None:
    """Give agents that are about to start their tokens, and ranks that meet anew a free port.

    Both are committed together with the decision, so no two ranks get different ports.
    """
    for host in [action.host for action in job.decided if isinstance(action, StartAgent)]:
        token = job.tokens[host] = secrets.token_urlsafe(32)
        job.attach(tokens_sha256={**job.attachment.tokens_sha256, host: sha256_of(token)})
    if job.needs_new_port:
        job.attach(master_port=group_port(job.attachment.master_port))


@dataclass(kw_only=True)
class AgentStarter:
    """Prepares jobs and starts their agents, each by the launcher of its host or scheduler."""

    settings: ServiceSettings
    local: Launcher
    others: Mapping[str, Launcher] = field(default_factory=dict)  # by host
    schedulers: Mapping[str, SchedulerJobs] = field(default_factory=dict)  # by engine
    facts: Callable[[], Awaitable[Mapping[str, HostFacts]]] | None = None
    """Returns what hosts have said, by name."""
    values: AgentValues = field(default_factory=lambda: AgentValues({}))
    """Of agents that schedulers start."""
    usable_vram_mb: Mapping[str, dict[str, int]] = field(default_factory=dict)  # by host and GPU
    joined: dict[tuple[str, str, int], bytes] = field(default_factory=dict)
    """By agent, who has used its token: a scheduler without memory may start a job twice."""

    async def start(
        self, job: TrackedJob, host: str, observe: Callable[[JobUid, Observation], None]
    ) -> AgentProcess | None:
        """Prepare the job and start its agent on a host; None if it is dismissed meanwhile.

        Raises `Unprepared`, `NotStarted`, or OSError.
        """
        # Living ranks have their places, but at home those of other machines prove nothing here.
        is_at_home, is_here = self.settings.nodes is not None, job.snapshot.agents[host].is_local
        if job.places is None or not job.snapshot.any_alive or (is_at_home and is_here):
            try:
                await self.prepare(job, is_start_here=is_here or not is_at_home)
            except Unprepared as error:
                if is_at_home and job.snapshot.spans_hosts:
                    raise NotStarted(str(error)) from error  # other machines may have them
                raise
        if self.facts is not None:
            await choose_kernels(job, self.facts)
        if job.snapshot.agents[host].is_wanted:
            files = DataDir(self.settings.data_dir).job(job.snapshot.job_id)
            await asyncio.to_thread(claim_directory, files, job.snapshot.uid)
            if job.takes_code and job.places is not None:
                observe(job.snapshot.uid, await _take_code(job, job.places.script))
        if not job.snapshot.agents[host].is_wanted:
            return None
        stamp("agent launched", job=job.snapshot.uid)
        return await self.launcher(job.snapshot, host).start(self.assignment(job, host))

    async def adopt(self, job: TrackedJob) -> None:
        """Have the places of a job that runs, and its directory, to which hosts send their logs."""
        with suppress(Unprepared):  # only a start needs them
            await self.prepare(job, is_start_here=False)
        files = DataDir(self.settings.data_dir).job(job.snapshot.job_id)
        with suppress(OSError):  # a full disk, or another job has it
            await asyncio.to_thread(claim_directory, files, job.snapshot.uid)

    @asynccontextmanager
    async def joining(
        self, job: TrackedJob | None, request: JoinRequest
    ) -> AsyncIterator[LaunchAgent | OrderFailed]:
        """Yield the answer to the parent of an agent of this job; None: of no job.

        A probe file lies in its directory of checkpoints until the caller is done.
        """
        if (
            job is None
            or job.places is None
            or job.is_connected(request.host, request.agent_number)
        ):
            yield OrderFailed(message="no such agent is expected: its job has ended, or moved on")
            return
        if why := self._refusal(request):
            job.note("agent_refused", f"{why}; it was turned away")
            yield OrderFailed(message=why)
            return
        assignment = self.assignment(job, request.host)
        joined = msgspec.structs.replace(assignment, token=request.token, is_joined=True)
        secrets_dir = Path(assignment.secrets_dir)
        complete = await asyncio.to_thread(self.values.complete, joined, secrets_dir)
        async with probe_file(assignment.checkpoint_dir) as probe:
            yield LaunchAgent(assignment=complete, environment=self.values.given, probe=probe)

    def _refusal(self, request: JoinRequest) -> str:
        """Return why a process is turned away, "" if it is not: each token is good for one."""
        if not is_compatible(request.version, request.protocol):
            theirs = f"{request.node} has Muster {release(request.version, request.protocol)}"
            return f"{theirs}, and the coordinator {release()}: install that there"
        key = request.job_uid, request.host, request.agent_number
        if self.joined.setdefault(key, request.nonce) != request.nonce:
            return f"{request.node} has shown the token of {request.host}, which was used before"
        return ""

    async def prepare(self, job: TrackedJob, *, is_start_here: bool) -> None:
        """Choose the places of a job. Raises `Unprepared`, if a rank is to start here."""
        choose = partial(prepare, is_start_here=is_start_here)
        job.places = await asyncio.to_thread(choose, job.snapshot.spec, self.settings)

    def assignment(self, job: TrackedJob, host: str) -> AgentAssignment:
        """Return the assignment of the job's next agent on a host."""
        return agent_assignment(job, host, self.settings, self.usable_vram_mb.get(host, {}))

    def launcher(self, snapshot: JobSnapshot, host: str) -> Launcher:
        """Return the launcher of the job's present agent on a host."""
        agent = snapshot.agents.get(host) or snapshot.hosts[host]
        if snapshot.is_scheduled:
            jobs = self.schedulers[snapshot.spec.engine or ""]
            return SchedulerLauncher(jobs, snapshot.uid, host, agent.agent_number, snapshot.spec)
        return self.local if agent.is_local else self.others[host]


async def _take_code(job: TrackedJob, script: Script | None) -> CodeTaken:
    job.takes_code = False
    code = await asyncio.to_thread(read_code, script)
    if script and (earlier := job.snapshot.spec.earlier):
        job.note("code_taken", f"goes on from job {earlier.job} with the code as it is now")
    return CodeTaken(files=code, script=script.file if script else "")
