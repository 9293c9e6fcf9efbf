"""Predicts what a route costs on links of a given latency and bandwidth."""

from collections import Counter, defaultdict
from typing import Final, NamedTuple, TypeAlias

from muster.collectives.routes import Problem, route_of, sent_elements, sent_messages

ALL_RANKS_STEPS: Final = 1 << 18
"""Up to this many rounds and messages in total, all ranks are added up: about half a second."""


class Link(NamedTuple):
    """Each direction has the whole bandwidth."""

    latency_seconds: float
    bytes_per_second: float


class LinkModel(NamedTuple):
    """The defaults are assumptions, not measurements: replace them by what your machines have."""

    inside: Link = Link(20e-6, 5e9)
    """What one rank has to the other ranks of its host: 20 µs, 5 GB/s."""
    between: Link = Link(100e-6, 125e6)
    """What one host has to the network, shared by its ranks: 100 µs, 1 Gbit/s."""


class Prediction(NamedTuple):
    seconds: float
    rounds: int
    messages: int
    """The most that a rank sends; so are the next two."""
    sent_bytes: int
    inside_bytes: int
    """Sent to ranks of the same host."""
    network_out_bytes: int
    """The most that the ranks of a host send to other hosts."""
    network_in_bytes: int


_Load: TypeAlias = Counter[tuple[int, int, str]]


def predict(
    operation: str, name: str, problem: Problem, itemsize: int, model: LinkModel
) -> Prediction:
    """Return what the route costs; elements have `itemsize` bytes. Raises `Unsupported`.

    A round takes as long as its slowest rank or host, and rounds follow each other:
    seconds = sum over rounds of max(latency + bytes / bandwidth), in the busier direction.
    Neither the additions nor the processor's work for a message count, which flatters "direct" and
    "whole" in large groups.

    Where all ranks together have more than `ALL_RANKS_STEPS` rounds and messages, a sample stands
    for them: of the first, the middle, the last and the root's host, the first rank, the last, the
    root, and one that counts for all others of that host. With equal parts and hosts of equal size
    that is exact for all routes but trees, and trees of up to 9,000 ranks are added up in full.
    """
    sample = _sample(problem)
    routes = {rank: route_of(operation, name, rank, problem) for rank in sample}
    steps = sum(len(route) + sent_messages(route) for route in routes.values())
    if steps * problem.world_size <= ALL_RANKS_STEPS * len(sample):
        sample = dict.fromkeys(range(problem.world_size), 1)
        routes = {rank: route_of(operation, name, rank, problem) for rank in sample}
    # Elements by round, rank or host, and direction: a rank has its own link inside a host, but
    # shares the one between hosts.
    inside: _Load = Counter()
    between: _Load = Counter()
    hosts = problem.hosts
    for rank, route in routes.items():
        for number, turn in enumerate(route):
            for way, pieces in (("out", turn.sends), ("in", turn.copies + turn.adds)):
                for peer, start, stop in pieces:
                    if hosts[peer] == hosts[rank]:
                        inside[number, rank, way] += stop - start
                    else:
                        between[number, hosts[rank], way] += (stop - start) * sample[rank]
    slowest: dict[int, float] = defaultdict(float)
    for load, link in ((inside, model.inside), (between, model.between)):
        for (number, _, _), elements in load.items():
            seconds = link.latency_seconds + elements * itemsize / link.bytes_per_second
            slowest[number] = max(slowest[number], seconds)
    return Prediction(
        seconds=sum(slowest.values()),
        rounds=len(routes[problem.root]),
        messages=max(map(sent_messages, routes.values())),
        sent_bytes=max(map(sent_elements, routes.values())) * itemsize,
        inside_bytes=_busiest(inside, "out") * itemsize,
        network_out_bytes=_busiest(between, "out") * itemsize,
        network_in_bytes=_busiest(between, "in") * itemsize,
    )


def _busiest(load: _Load, way: str) -> int:
    """Return the elements of all rounds, of the rank or host that has most."""
    totals: Counter[int] = Counter()
    for (_, owner, direction), elements in load.items():
        totals[owner] += elements * (direction == way)
    return max(totals.values(), default=0)


def _sample(problem: Problem) -> dict[int, int]:
    """Return ranks, and for how many ranks of its host each stands."""
    members: dict[int, list[int]] = defaultdict(list)
    for rank, host in enumerate(problem.hosts):
        members[host].append(rank)
    names = list(members)
    sample: dict[int, int] = {}
    for host in {names[0], names[len(names) // 2], names[-1], problem.hosts[problem.root]}:
        ranks = members[host]
        special = {ranks[0], ranks[-1], problem.root} & set(ranks)
        alike = [rank for rank in ranks if rank not in special]
        # A ring enters a host at its first rank and leaves it at the last.
        sample |= dict.fromkeys(special, 1)
        if alike:
            sample[alike[0]] = len(alike)
    return sample
