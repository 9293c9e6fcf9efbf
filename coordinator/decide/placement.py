"""On which host each rank of a job runs. Pure.

Hosts fill in the order of the cluster's file, the coordinator's own first. A rank keeps its host
until that is lost; then it moves to another one, if one has a free slot, or waits for its return.
"""

from collections.abc import Iterable, Iterator, Mapping

from coordinator.decide.actions import PlaceRank
from coordinator.decide.state import AgentSnapshot, JobSnapshot, RankSnapshot
from muster.contracts.agent import AgentState


def slots_in_use(jobs: Iterable[JobSnapshot]) -> dict[str, int]:
    """Return how many slots these jobs hold on each host."""
    used: dict[str, int] = {}
    for job in jobs:
        for rank in job.ranks:
            if job.holds_slot(rank):
                used[rank.host] = used.get(rank.host, 0) + 1
    return used


def place(snapshot: JobSnapshot, free: Mapping[str, int], now: float) -> Iterator[PlaceRank]:
    """Yield a host for each rank that is to start and has none, or has lost it.

    `free` are the free slots of each host.
    """
    if len(snapshot.agents) == 1 or snapshot.is_ending:
        return
    left = dict(free)
    for rank in snapshot.ranks:
        if not rank.is_down or not _needs_place(snapshot, rank, now):
            continue
        hosts = [
            agent.host
            for agent in snapshot.agents.values()
            if left.get(agent.host, 0) > 0 and not is_set_aside(agent, now)
        ]
        if hosts:
            left[hosts[0]] -= 1
            yield PlaceRank(rank=rank.rank, host=hosts[0])


def _needs_place(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> bool:
    agent = snapshot.agents.get(rank.host)
    return agent is None or is_set_aside(agent, now)


def is_set_aside(agent: AgentSnapshot, now: float) -> bool:
    """True if a host was lost, or has lost its agents, and is not tried again yet."""
    return agent.state is AgentState.ABSENT and agent.failures > 0 and now < agent.start_at
