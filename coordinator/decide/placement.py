"""Which queued jobs may start, and on which host of the cluster file each rank runs. Pure.

First come, first served: no job overtakes another that waits for others to end, so that a stream of
small jobs cannot starve a large one. A rank goes to the host with the highest score
(`muster.cluster.placement`) and keeps it until that host is lost; then it moves to another one that
has room, or waits for its return. A host that asked to join comes before any score.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from coordinator.decide.actions import PlaceRank
from coordinator.decide.state.job import AgentSnapshot, JobSnapshot
from coordinator.decide.state.rank import RankSnapshot
from muster.cluster.description import Cluster
from muster.cluster.placement import RankRequest, use_of
from muster.cluster.placement import place as place_requests
from muster.contracts.agent import AgentState

NAMED: Final = 3  # how many of the jobs that hold slots a message names; it counts the others


def admit(
    waiting: Sequence[JobSnapshot],
    holding: Iterable[JobSnapshot],
    cluster: Cluster,
    refusals: Mapping[str, str],
    now: float,
) -> Iterator[list[PlaceRank] | str]:
    """Yield the hosts of each waiting job's ranks, or a sentence why it waits.

    `waiting` is in order of submission; `holding` are the jobs that have left the queue.
    """
    placed, ahead = list(_placed(holding)), 0
    uses = use_of(cluster, placed)
    for job in waiting:
        if job.is_scheduled:
            yield list(_place_on_scheduler(job, now))
            continue
        ranks = [rank.rank for rank in job.in_service]
        if ahead:
            yield _describe_turn(len(ranks), cluster, ahead)
            ahead += 1
            continue
        request = RankRequest(job.job_id, job.spec)
        requests = _requests(request, len(ranks), job.wanted_hosts)
        placements = place_requests(cluster, requests, uses, refusals)
        hosts = [placement.chosen.node for placement in placements if placement.chosen is not None]
        # Scripts for torchrun expect that the ranks of a host follow each other.
        hosts.sort(key=list(job.hosts).index)
        if len(hosts) == len(ranks):
            placed += [(request, host) for host in hosts]
            pairs = zip(ranks, hosts, strict=True)
            yield [PlaceRank(rank=rank, host=host) for rank, host in pairs]
            continue
        uses = use_of(cluster, placed)  # without its ranks that fit
        # One that waits for a host to be corrected holds up no other.
        alone = place_requests(cluster, requests, refusals=refusals)
        ahead = int(all(placement.chosen for placement in alone))
        if ahead and not cluster.is_described:
            yield _describe_wait(len(ranks), cluster, [request.job_id for request, _ in placed])
        else:
            why = next(placement for placement in placements if placement.chosen is None)
            yield f"waits: only {len(hosts)} of its {len(ranks)} ranks fit now; {why}"


def place(
    job: JobSnapshot,
    holding: Iterable[JobSnapshot],
    cluster: Cluster,
    refusals: Mapping[str, str],
    now: float,
) -> Iterator[PlaceRank]:
    """Yield a host for each rank of an admitted job that is to start and has none, or has lost it.

    `holding` are all admitted jobs, this one included.
    """
    if job.is_scheduled:
        yield from _place_on_scheduler(job, now)
        return
    waiting = list(ranks_to_place(job, now))
    nodes = [
        node
        for node in cluster.nodes
        if not is_set_aside(job.agents.get(node.name, job.hosts[node.name]), now)
    ]
    if not nodes:
        return
    present = Counter(rank.host for rank in job.in_service if rank not in waiting)
    missing = Counter(job.wanted_hosts) - present
    requests = _requests(RankRequest(job.job_id, job.spec), len(waiting), missing)
    uses = use_of(cluster, _placed(holding))
    placements = place_requests(Cluster(nodes=tuple(nodes)), requests, uses, refusals)
    for rank, placement in zip(waiting, placements, strict=True):
        if placement.chosen is not None:
            yield PlaceRank(rank=rank.rank, host=placement.chosen.node)


def _place_on_scheduler(job: JobSnapshot, now: float) -> Iterator[PlaceRank]:
    """Yield a host for each rank of a job, for which a scheduler chooses the machine.

    Its hosts are full one after the other. None waits for room: that is the scheduler's part.
    """
    options, waiting = job.spec.scheduler_options, list(ranks_to_place(job, now))
    if options is None or not waiting:
        return
    taken = Counter(rank.host for rank in job.ranks if rank.in_service or rank.is_alive)
    for rank in waiting:
        free = (
            host
            for host, fresh in job.hosts.items()
            if taken[host] < options.ranks_per_host
            and not is_set_aside(job.agents.get(host, fresh), now)
        )
        if (host := next(free, None)) is None:
            return
        taken[host] += 1
        yield PlaceRank(rank=rank.rank, host=host)


def is_set_aside(agent: AgentSnapshot, now: float) -> bool:
    """True if a host was lost, or has lost its agents, and is not tried again yet.

    Never our own: that a job saves there is worth more than a start elsewhere. An unfit host is not
    used again.
    """
    is_lost = agent.state is AgentState.ABSENT and agent.failures > 0 and now < agent.start_at
    return agent.is_unfit or (is_lost and not agent.is_local)


def ranks_to_place(job: JobSnapshot, now: float) -> Iterator[RankSnapshot]:
    """Yield the ranks that are to start and have no host, or have lost it."""
    if job.is_ending or (job.agents.keys() == job.hosts.keys() and not job.spans_hosts):
        return
    for rank in job.ranks:
        agent = job.agents.get(rank.host)
        if rank.is_down and (agent is None or is_set_aside(agent, now)):
            yield rank


def _describe_turn(wanted: int, cluster: Cluster, ahead: int) -> str:
    if cluster.is_described:
        return f"waits for {wanted} slots; jobs ahead of it: {ahead}"
    jobs = "1 job is" if ahead == 1 else f"{ahead} jobs are"
    return f"waits for {wanted} of {cluster.nodes[0].slots} slots; {jobs} ahead of it"


def _describe_wait(wanted: int, cluster: Cluster, holders: Sequence[str]) -> str:
    """Return why a job waits for the only node; `holders` has the job of each slot in use."""
    slots = cluster.nodes[0].slots or 0
    if wanted > slots:
        return (
            f"needs {wanted} slots, more than the {slots} there are (MUSTER_SLOTS): it starts when "
            "no other job runs"
        )
    free = max(0, slots - len(holders))
    free_slots = "1 is free" if free == 1 else f"{free} are free"
    names = [*dict.fromkeys(holders)]
    more = len(names) - NAMED
    *others, last = [*names[:NAMED], *([f"{more} more"] if more > 0 else [])]
    hold = f"{', '.join(others)} and {last} hold" if others else f"{last} holds"
    return f"waits for {wanted} of {slots} slots (MUSTER_SLOTS); {free_slots}, {hold} the others"


def _requests(request: RankRequest, count: int, missing: Mapping[str, int]) -> list[RankRequest]:
    """Return the request for each of `count` ranks; the last ones prefer hosts that miss ranks.

    The first one may be for the rank that saves, which has no choice.
    """
    hosts = list(islice(Counter(missing).elements(), count))
    return [request] * (count - len(hosts)) + [request._replace(preferred=host) for host in hosts]


def _placed(jobs: Iterable[JobSnapshot]) -> Iterator[tuple[RankRequest, str]]:
    for job in jobs:
        if job.is_scheduled:
            continue  # its slots are those of the scheduler
        request = RankRequest(job.job_id, job.spec)
        yield from ((request, rank.host) for rank in job.ranks if job.holds_slot(rank))
