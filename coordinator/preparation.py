"""What an agent is given before it starts: directories that exist, kernels, its assignment."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from coordinator.decide.state.job_end import JobFailure
from coordinator.tracked_job import TrackedJob
from muster.cluster.requests import assignment_of
from muster.contracts.agent import LOOPBACK
from muster.contracts.host import HostFacts, common_environment
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobUid, Reason
from muster.contracts.location import InvalidLocation
from muster.contracts.messages.assignment import AdoptedRank, AgentAssignment, CoordinatorAddress
from muster.contracts.messages.attach import JoinOrder
from muster.contracts.settings.environ import process_tag
from muster.contracts.settings.paths import DataDir, JobFiles
from muster.contracts.settings.services import ServiceSettings
from muster.datasets.errors import DatasetError
from muster.datasets.sources import open_source
from muster.datasets.synthetic import ensure_synthetic
from muster.job_defaults import ResolvedSpec, resolve
from muster.objects.errors import ObjectStoreError


class Unprepared(Exception):
    """The job cannot run."""

    def __init__(self, failure: JobFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def prepare(
    spec: JobSpec, settings: ServiceSettings, *, is_start_here: bool = True
) -> ResolvedSpec:
    """Return the job with its directories; create the synthetic data set if it trains on that.

    Blocks on the disk. Missing data or a missing directory fails the job here, with a sentence, and
    not fifty times in a rank, unless no rank is about to start on this host. Raises `Unprepared`.
    """
    try:
        resolved = resolve(spec, settings, Path.cwd())
        if not is_start_here:
            return resolved
        if spec.command is None:  # a command knows itself which data it needs
            if resolved.dataset_dir == DataDir(settings.data_dir).synthetic_dataset:
                ensure_synthetic(resolved.dataset_dir)
            elif isinstance(resolved.dataset_dir, Path):
                open_source(resolved.dataset_dir)
            # A store that is away must fail no job that trains: the ranks ask for it themselves.
    except (DatasetError, ObjectStoreError, InvalidLocation) as error:
        raise Unprepared(JobFailure(reason=Reason.INVALID_DATASET, message=str(error))) from error
    is_directory = False
    with suppress(OSError):  # the name is too long, or a parent must not be searched
        is_directory = resolved.working_dir.is_dir()
    if not is_directory:
        message = f"the working directory {resolved.working_dir} does not exist: create it first"
        raise Unprepared(JobFailure(reason=Reason.INVALID_PROGRAM, message=message))
    return resolved


def kept_code(files: JobFiles, uid: JobUid) -> dict[str, str]:
    """Return the code of a job as its ranks have it; {} if its directory does not tell."""
    with suppress(OSError, msgspec.DecodeError):
        if files.owner.read_text() == uid:
            return msgspec.json.decode(files.code.read_bytes(), type=dict[str, str])
    return {}


async def choose_kernels(
    job: TrackedJob, known_facts: Callable[[], Awaitable[Mapping[str, HostFacts]]]
) -> None:
    """Choose the variables that each host of a job needs, once and for good.

    A later choice would change the bits of a job that goes on. Where none can be made, ranks
    that compute other bits are refused when they meet. An event says what was chosen, and why.
    """
    snapshot = job.snapshot
    if not (snapshot.is_synchronous and snapshot.spans_hosts):
        return
    if snapshot.is_scheduled:
        return  # nothing is known of machines that it has not got yet
    known, names = await known_facts(), snapshot.spec.hosts
    if job.attachment.numeric_environment is not None:
        return  # chosen for another agent, meanwhile or before
    facts = {host: known[host] for host in names or snapshot.hosts if host in known}
    chosen, why = common_environment(facts)
    if why and snapshot.spec.bits == "any":
        chosen, why = {}, "its bits are not promised"
    job.attach(numeric_environment=chosen)
    if why:
        hosts = "; ".join(
            f"{snapshot.host_name(host)}: {own.arithmetic}" for host, own in facts.items()
        )
        job.note("hosts_differ", f"hosts differ ({hosts}): {why}")


def agent_assignment(
    job: TrackedJob, host: str, settings: ServiceSettings, usable_vram_mb: Mapping[str, int]
) -> AgentAssignment:
    """Return the assignment of a job's next agent on a host, with that memory of its GPUs."""
    snapshot, agent = job.snapshot, job.snapshot.agents[host]
    endpoint = None if agent.is_local else settings.agent_endpoint
    if settings.nodes is not None:
        # Another node may lead next, so on this host, too, agents send their logs once it does.
        endpoint = LOOPBACK, 0  # a launcher says where agents of other hosts connect
    order = JoinOrder(
        job_uid=snapshot.uid,
        host=host,
        agent_number=agent.agent_number,
        token=job.tokens.get(host, ""),
        coordinator=endpoint and CoordinatorAddress(host=endpoint[0], port=endpoint[1]),
    )
    ranks, job_id = snapshot.ranks_on(host), snapshot.job_id
    needs: tuple[str, ...] = ()
    if job.places is not None:
        script, data = job.places.script, job.places.dataset_dir
        needed = [job.places.working_dir, script and script.file]
        if snapshot.spec.command is None and isinstance(data, Path):  # a command knows itself
            needed.append(data)
        needs = tuple(str(path) for path in needed if path)
    given = assignment_of(order, job_id, snapshot.spec, settings, is_local=agent.is_local)
    vram = given.vram and msgspec.structs.replace(given.vram, usable_mb=dict(usable_vram_mb))
    return msgspec.structs.replace(
        given,
        gpus_at_once=given.gpus_at_once * (max(1, len(ranks)) if snapshot.is_gang else 1),
        vram=vram,
        needs=needs,
        environment=(job.attachment.numeric_environment or {}).get(host, {}),
        adopted=tuple(
            AdoptedRank(
                rank=rank.rank,
                attempt=rank.attempt.number,
                process=rank.attempt.identity,
                process_tag=process_tag(snapshot.uid, rank.rank, rank.attempt.number),
            )
            for rank in ranks
            if rank.is_alive and rank.attempt.identity is not None
        ),
    )
