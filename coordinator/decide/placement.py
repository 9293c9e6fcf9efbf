"""On which host of a cluster each rank runs. Pure.

A rank goes to the host with the highest score (`muster.cluster.placement`) and keeps it until that
host is lost; then it moves to another one that has room, or waits for its return. A host that asked
to join comes before any score.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from coordinator.decide.actions import PlaceRank
from coordinator.decide.rank_state import RankSnapshot
from coordinator.decide.state import AgentSnapshot, JobSnapshot
from muster.cluster.description import Cluster
from muster.cluster.placement import RankRequest, use_of
from muster.cluster.placement import place as place_requests
from muster.contracts.agent import AgentState


def admit(
    waiting: Sequence[JobSnapshot],
    holding: Iterable[JobSnapshot],
    cluster: Cluster,
    refusals: Mapping[str, str],
) -> Iterator[list[PlaceRank] | str]:
    """Yield the hosts of each waiting job's ranks, or a sentence why it waits.

    First come, first served, as in `coordinator.decide.admission`: no job overtakes another that
    waits for others to end.
    """
    placed, ahead = list(_placed(holding)), 0
    for job in waiting:
        ranks = [rank.rank for rank in job.in_service]
        if ahead:
            yield f"waits for {len(ranks)} slots; jobs ahead of it: {ahead}"
            ahead += 1
            continue
        request = RankRequest(job.job_id, job.spec)
        requests = _requests(request, len(ranks), job.wanted_hosts)
        placements = place_requests(cluster, requests, use_of(cluster, placed), refusals)
        hosts = [it.chosen.node for it in placements if it.chosen is not None]
        # Scripts for torchrun expect that the ranks of a host follow each other.
        hosts.sort(key=list(job.hosts).index)
        if len(hosts) == len(ranks):
            placed += [(request, host) for host in hosts]
            pairs = zip(ranks, hosts, strict=True)
            yield [PlaceRank(rank=rank, host=host) for rank, host in pairs]
        else:
            why = next(it for it in placements if it.chosen is None)
            yield f"waits: only {len(hosts)} of its {len(ranks)} ranks fit now; {why}"
            # One that waits for a host to be corrected holds up no other.
            alone = place_requests(cluster, requests, refusals=refusals)
            ahead = int(all(it.chosen for it in alone))


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


def place_on_scheduler(job: JobSnapshot, now: float) -> Iterator[PlaceRank]:
    """Yield a host for each rank of a job, for which a scheduler chooses the machine.

    Its hosts are full one after the other. None waits for room: that is the scheduler's part.
    """
    options, waiting = job.spec.scheduler_options, list(ranks_to_place(job, now))
    if options is None or not waiting:
        return
    taken = Counter(it.host for it in job.ranks if it.in_service or it.is_alive)
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


def _requests(request: RankRequest, count: int, missing: Mapping[str, int]) -> list[RankRequest]:
    """Return the request for each of `count` ranks; the last ones prefer hosts that miss ranks.

    The first one may be for the rank that saves, which has no choice.
    """
    hosts = list(islice(Counter(missing).elements(), count))
    return [request] * (count - len(hosts)) + [request._replace(preferred=it) for it in hosts]


def _placed(jobs: Iterable[JobSnapshot]) -> Iterator[tuple[RankRequest, str]]:
    for job in jobs:
        request = RankRequest(job.job_id, job.spec)
        yield from ((request, rank.host) for rank in job.ranks if job.holds_slot(rank))
