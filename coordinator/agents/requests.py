"""From a durable decision to its effect: a request to an agent, or an agent's start and end."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import assert_never

import msgspec

from coordinator.agents.lifecycle import AgentLifecycle
from coordinator.agents.server import AgentServer
from coordinator.decide import actions
from coordinator.decide.state.job import JobSnapshot
from coordinator.tracked_job import TrackedJob
from database.records import Event, utc_now
from muster.contracts.agent import LOOPBACK
from muster.contracts.messages.agent import (
    AnnounceGroup,
    CoordinatorMessage,
    Dismiss,
    InjectFault,
    KillRank,
    ListCheckpoints,
    StartRank,
    TerminateRank,
)
from muster.contracts.messages.rank import GroupMember, WorkerGroup
from muster.contracts.settings.environ import Assignment, HostPlace, rank_environment
from muster.contracts.settings.paths import checkpoints_of_job
from muster.host.trace import stamp
from muster.job_defaults import ResolvedSpec


class Executor:
    """Performs decided actions; what comes of them is observed later."""

    def __init__(self, lifecycle: AgentLifecycle, addresses: Mapping[str, str]) -> None:
        """`addresses` says at which address the ranks of a host are reached from other hosts."""
        self._lifecycle = lifecycle
        self._addresses = addresses
        self.agents: AgentServer | None = None
        """Sends the requests; without one nothing is sent."""

    def perform(self, job: TrackedJob) -> None:  # noqa: C901, PLR0912  one case for each action
        """Perform what was decided for a job."""
        decided, job.decided = job.decided, []
        for action in decided:
            stamp("performed", job=job.snapshot.uid, action=type(action).__name__)
            match action:
                case actions.StartAgent():
                    self._lifecycle.start(job, action.host)
                case actions.KillAgent():
                    self._lifecycle.kill(job, action.host)
                case actions.DismissAgent():
                    self._send(job, action.host, Dismiss())
                    self._lifecycle.dismiss(job, action.host)
                case actions.LoseHost():
                    self._send(job, action.host, Dismiss())  # it may receive this, see `Partition`
                    self._lifecycle.give_up(job, action.host)
                case actions.DrainLogs():
                    if self.agents is not None:
                        self.agents.drain_logs(job.snapshot.uid, action.host)
                case actions.ListCheckpoints():
                    self._send(job, action.host, list_request(job))
                case actions.Start():
                    start = start_request(job, action.rank, self._addresses_of(job))
                    self._send(job, job.snapshot.ranks[action.rank].host, start)
                case actions.Terminate():
                    self._send_to_rank(job, action.rank, TerminateRank)
                case actions.KillProcess():
                    self._send_to_rank(job, action.rank, KillRank)
                case actions.PublishGroup():
                    self._send_group(job)
                case (
                    actions.Suspect()
                    | actions.ReportSlowExit()
                    | actions.SetStatus()
                    | actions.AddRank()
                    | actions.RemoveRank()
                    | actions.PlaceRank()
                ):
                    pass
                case _:
                    assert_never(action)

    def announce(self, job: TrackedJob) -> bool:
        """Send a decided group round before its commit if that is safe; return whether it is."""
        if not job.may_announce:
            return False
        job.decided = [
            action for action in job.decided if not isinstance(action, actions.PublishGroup)
        ]
        stamp("announced", job=job.snapshot.uid)
        self._send_group(job)
        return True

    def repeat_requests(self, job: TrackedJob) -> None:
        """Repeat what agents that have connected may have missed; they ignore what they know.

        Only durable decisions: a new one is performed as soon as it is durable.
        """
        while job.repeat_to and not job.decided:
            host = job.repeat_to.pop()
            for request in pending_requests(job, host, self._addresses_of(job)):
                self._send(job, host, request)

    def inject_faults(self, job: TrackedJob) -> None:
        """Pass on what was requested, now or never; recoveries are measured from these events."""
        faults, job.faults = job.faults, []
        for fault in faults:
            attempts = tuple((process.rank, process.attempt) for process in fault.processes)
            request = InjectFault(signal=fault.signal, attempts=attempts, agent=fault.agent)
            at, is_sent = utc_now(), self._send(job, fault.host, request)
            kind, word = ("fault_injected", "was") if is_sent else ("fault_dropped", "was not")
            why = "" if is_sent else f": the agent on {fault.host} is not connected"
            for process in fault.processes:
                pid, rank, attempt = process.pid, process.rank, process.attempt
                words = f"{fault.signal.name} {word} sent to pid {pid} of rank {rank}{why}"
                event = Event(at=at, kind=kind, message=words, rank=rank, attempt=attempt)
                job.events.append(event)
                job.revision += 1

    def dismiss(self, job: TrackedJob) -> None:
        """Tell all agents to exit."""
        for host in job.snapshot.agents:
            self._send(job, host, Dismiss())

    def _send_to_rank(
        self, job: TrackedJob, number: int, kind: type[TerminateRank | KillRank]
    ) -> None:
        rank = job.snapshot.ranks[number]
        self._send(job, rank.host, kind(rank=number, attempt=rank.attempt.number))

    def _addresses_of(self, job: TrackedJob) -> Mapping[str, str]:
        return {**self._addresses, **job.addresses} if job.addresses else self._addresses

    def _send_group(self, job: TrackedJob) -> None:
        """Send the group to all hosts: a rank that is no member any more exits."""
        request = group_request(job, self._addresses_of(job))
        for host in job.snapshot.agents:
            self._send(job, host, request)

    def _send(self, job: TrackedJob, host: str, request: CoordinatorMessage) -> bool:
        return self.agents is not None and self.agents.send(job.snapshot.uid, host, request)


def pending_requests(
    job: TrackedJob, host: str, addresses: Mapping[str, str]
) -> Iterator[CoordinatorMessage]:
    """Yield every request that an agent needs which has just connected.

    Without the places of a job, as when its data is gone after a takeover, nothing is started.
    """
    is_prepared = job.places is not None
    if is_prepared and job.snapshot.agents[host].listing.is_open:
        yield list_request(job)
    for rank in job.snapshot.ranks_on(host):
        if is_prepared and rank.is_alive and rank.attempt.identity is None:
            yield start_request(job, rank.rank, addresses)
        if rank.is_alive and rank.attempt.intent.terminated_at is not None:
            yield TerminateRank(rank=rank.rank, attempt=rank.attempt.number)
        if rank.is_alive and rank.attempt.intent.kill is not None:
            yield KillRank(rank=rank.rank, attempt=rank.attempt.number)
    if job.snapshot.group.workers:
        yield group_request(job, addresses)


def list_request(job: TrackedJob) -> ListCheckpoints:
    """Return the request to list what the ranks of a gang have saved."""
    snapshot, place = job.snapshot, _places(job).checkpoint_dir
    earlier = snapshot.spec.earlier
    return ListCheckpoints(
        attempt=snapshot.next_attempt,
        location=str(checkpoints_of_job(place, snapshot.job_id)),
        inherited=str(checkpoints_of_job(place, earlier.job)) if earlier else None,
        ranks=len(snapshot.ranks),
    )


def start_request(job: TrackedJob, number: int, addresses: Mapping[str, str]) -> StartRank:
    """Return the request to start the present attempt of a rank."""
    snapshot, places = job.snapshot, _places(job)
    rank = snapshot.ranks[number]
    assignment = Assignment(
        job_id=snapshot.job_id,
        job_uid=snapshot.uid,
        rank=number,
        attempt=rank.attempt.number,
        checkpoint_dir=places.checkpoint_dir,
        dataset_dir=places.dataset_dir,
        master_port=job.attachment.master_port,
        generation=snapshot.next_attempt - 1 if snapshot.is_gang else rank.attempt.number,
        restore_from=str(point) if (point := snapshot.restore.point) else None,
        place=host_place(snapshot, number, addresses),
    )
    # The present world size includes every rank there is.
    spec = msgspec.structs.replace(snapshot.spec, world_size=len(snapshot.ranks))
    # The command of a snapshot names a copy, which is not edited, or a module that is in it.
    script = None if spec.code == "snapshot" else places.script
    digest = snapshot.code.files.get(script.file) if script else None
    return StartRank(
        rank=number,
        attempt=rank.attempt.number,
        environment=rank_environment(spec, assignment),
        working_dir=str(places.working_dir),
        script=(script.file, digest) if script and digest else None,
        is_code_bound=spec.is_code_bound,
    )


def host_place(snapshot: JobSnapshot, number: int, addresses: Mapping[str, str]) -> HostPlace:
    """Return a rank's place on its host. Hosts count in their order, the ranks of each in theirs.

    Hosts without ranks have no place: torchrun's numbers of hosts have no gaps.
    """
    host = snapshot.ranks[number].host
    beside = [rank.rank for rank in snapshot.ranks_on(host)]
    hosts = [name for name, ranks in snapshot.ranks_by_host().items() if ranks]
    return HostPlace(
        local_rank=beside.index(number),
        local_world_size=len(beside),
        group_rank=hosts.index(host),
        group_world_size=len(hosts),
        host_count=len(snapshot.hosts),
        master_address=_address_of(snapshot, 0, addresses),
    )


def group_request(job: TrackedJob, addresses: Mapping[str, str]) -> AnnounceGroup:
    """Return the present group round; a repetition is identical, byte by byte."""
    group = job.snapshot.group
    ranks = [job.snapshot.ranks[rank] for rank in group.ranks]
    members = tuple(
        GroupMember(
            worker_id=worker,
            rank=rank.rank,
            host=rank.host,
            address=_address_of(job.snapshot, rank.rank, addresses),
            port=0 if (said := rank.attempt.member.ready) is None else said.port,
        )
        for worker, rank in zip(group.workers, ranks, strict=True)
    )
    token = sha256(f"{job.group_secret}/{group.round}".encode()).hexdigest()
    message = WorkerGroup(
        round=group.round,
        token=token,
        members=members,
        paused=group.paused,
        save=group.save > 0,
        exporter=group.exporter,
    )
    return AnnounceGroup(group=message, attempts=group.attempts)


def _address_of(snapshot: JobSnapshot, number: int, addresses: Mapping[str, str]) -> str:
    """Return where a rank is reached; on the only host of a job, or without a place, by loopback.

    A rank whose host was lost has no place, and may still be in a group that is about to end.
    """
    own = addresses.get(snapshot.ranks[number].host, LOOPBACK)
    return own if snapshot.spans_hosts else LOOPBACK


def _places(job: TrackedJob) -> ResolvedSpec:
    if job.places is None:
        raise RuntimeError(f"job {job.snapshot.job_id} was not prepared before its ranks start")
    return job.places
