"""The routes of collective operations as data: which elements a rank sends and receives, in rounds.

Operations come in pairs that are each other's reversal in time: reduce and broadcast, gather and
scatter, reduce-scatter and all-gather (Chan, Heimlich, Purkayastha and van de Geijn, "Collective
communication: theory, practice, and experience", 2007). Only the first of each pair is written down
here, and an all-reduce is one of them followed by its reversal.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf
from typing import Final, NamedTuple, TypeAlias

from muster.collectives.errors import Unsupported
from muster.contracts.shards import ranges

ARITY: Final = 2
"""The number of children in a tree. With more, a parent receives more buffers in each round."""

WHOLE_BYTES: Final = 32 << 10
"""What a rank may receive in the one round of "whole". It saves a latency, in which a link carries
latency · bandwidth: 12 KiB between hosts (100 µs, 1 Gbit/s), 98 KiB inside one (20 µs, 5 GB/s)."""

LARGE_BYTES: Final = 1 << 20
"""From this size on, bytes count for more than rounds."""


SEGMENTS: Final = 4
"""Of a pipelined route. With n of them, a phase that another one hides takes 1 / n of its time."""


class Piece(NamedTuple):
    """One message: the elements [start, stop) of the buffer, to or from `peer`."""

    peer: int
    start: int
    stop: int


class Round(NamedTuple):
    """Messages that are under way at the same time.

    Sends read what the buffer held before the round. Pieces that are added to the same elements
    have equal ranges, and are combined with the rank's own elements in ascending order of rank.
    Otherwise no received piece overlaps another one or a send; only in the route "whole" adds
    overlap sends, so the engine has to receive them into other memory.
    """

    sends: tuple[Piece, ...] = ()
    copies: tuple[Piece, ...] = ()
    """Received pieces that replace the elements."""
    adds: tuple[Piece, ...] = ()
    """Received pieces that are combined with the elements."""


Route: TypeAlias = tuple[Round, ...]
"""What one rank does. All ranks have the same number of rounds, some of them empty. A message is
sent and received in the same round. Pieces without elements are left out on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a route depends on, apart from operation and rank; the same on all ranks."""

    world_size: int
    bounds: tuple[int, ...]
    """world_size + 1 offsets in elements, from 0: rank r's part is [bounds[r], bounds[r + 1])."""
    root: int = 0
    """Also of an all-reduce that goes through one rank."""
    hosts: tuple[int, ...] = ()
    """The host number of each rank; all 0 if empty. If the ranks of a host are neighbours, a ring
    crosses each host's link once."""

    def of_size(self, elements: int) -> "Problem":
        """Return the same for a buffer of so many elements, cut into equal parts."""
        bounds = (0, *(stop for _, stop in ranges(elements, self.world_size)))
        return replace(self, bounds=bounds)

    def __post_init__(self) -> None:
        if not self.hosts:
            object.__setattr__(self, "hosts", (0,) * self.world_size)


Builder: TypeAlias = Callable[[int, Problem], Route]
"""Returns the route of a rank."""


def route_of(operation: str, name: str, rank: int, problem: Problem) -> Route:
    """Return what `rank` does in `operation` by the route `name`; nothing if it is alone.

    Which elements of the buffer count before and after:

        all_reduce      all: own values        all: the combination, the same bits on all ranks
        reduce          all: own values        all: the combination, on the root only
        broadcast       all, on the root       all
        gather          own part               all, on the root only
        scatter         all, on the root       own part
        all_gather      own part               all
        reduce_scatter  all: own values        own part: the combination

    Other elements may be overwritten. Raises `Unsupported` if the operation has no such route.
    """
    builders = ROUTES[operation]
    if name not in builders:
        raise Unsupported(f"{operation} has no route {name!r}: use one of {', '.join(builders)}")
    # A rank alone has nothing to exchange; the builders would make it its own neighbour.
    return builders[name](rank, problem) if problem.world_size > 1 else ()


def sent_elements(route: Route) -> int:
    """Return the number of elements that the rank sends."""
    return sum(piece.stop - piece.start for turn in route for piece in turn.sends)


def sent_messages(route: Route) -> int:
    """Return the number of messages that the rank sends."""
    return sum(len(turn.sends) for turn in route)


def _reduce_tree(rank: int, problem: Problem) -> Route:
    """Combine towards the root, level by level; node v has the children ARITY·v + 1, …"""
    size, root, total = problem.world_size, problem.root, problem.bounds[-1]
    # Renumbered so that any rank can be the root, node 0.
    node = (rank - root) % size
    level, depth = _level(node), _level(size - 1)
    children = range(ARITY * node + 1, min(ARITY * (node + 1) + 1, size))
    rounds = [Round()] * depth
    if children:  # all of them are on the next level, so they send in the same round
        peers = [(child + root) % size for child in children]
        rounds[depth - level - 1] = Round(adds=_pieces(peers, 0, total))
    if node:
        parent = ((node - 1) // ARITY + root) % size
        # A leaf above the lowest level sends with its level, so that every parent has one round.
        rounds[depth - level] = Round(sends=_pieces([parent], 0, total))
    return tuple(rounds)


def _level(node: int) -> int:
    """Return the distance of `node` from the root."""
    return 1 + _level((node - 1) // ARITY) if node else 0


def _reduce_direct(rank: int, problem: Problem) -> Route:
    return (_to_hub(rank, range(problem.world_size), problem.root, problem.bounds[-1]),)


def _to_hub(rank: int, members: Iterable[int], hub: int, total: int) -> Round:
    """Every member sends its buffer to the `hub`, which combines them."""
    if rank != hub:
        return Round(sends=_pieces([hub], 0, total))
    return Round(adds=_pieces([member for member in members if member != hub], 0, total))


def _gather_direct(rank: int, problem: Problem) -> Route:
    if rank != problem.root:
        return (Round(sends=_pieces([problem.root], *_part(problem.bounds, rank))),)
    return (Round(copies=_parts_of(peers_after(rank, problem.world_size), problem)),)


def _reduce_scatter_direct(rank: int, problem: Problem) -> Route:
    """Every rank sends each peer that peer's part, and combines its own."""
    peers = peers_after(rank, problem.world_size)
    adds = _pieces(peers, *_part(problem.bounds, rank))
    return (Round(sends=_parts_of(peers, problem), adds=adds),)


def _reduce_scatter_ring(rank: int, problem: Problem) -> Route:
    return _ring(range(problem.world_size), rank, problem.bounds)


def _ring(members: Sequence[int], position: int, bounds: Sequence[int]) -> Route:
    """Partial sums go around: part p starts after its owner and ends, complete, at its owner.

    This is the first half of the all-reduce of Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations" (2009), shifted so that a rank ends with its own part.
    """
    size = len(members)
    right, left = members[(position + 1) % size], members[position - 1]
    return tuple(
        Round(
            # What is sent now was completed up to this rank in the round before.
            sends=_pieces([right], *_part(bounds, (position - 1 - step) % size)),
            adds=_pieces([left], *_part(bounds, (position - 2 - step) % size)),
        )
        for step in range(size - 1)
    )


def _reduce_two_level(rank: int, problem: Problem) -> Route:
    """Combine inside each host, then in a ring of its lowest ranks, over a part for each host.

    Between hosts, the number of ranks on a host then changes neither bytes nor rounds.
    """
    members: dict[int, list[int]] = {}
    for member, host in enumerate(problem.hosts):
        members.setdefault(host, []).append(member)
    leaders = [ranks[0] for ranks in members.values()]
    own, total = members[problem.hosts[rank]], problem.bounds[-1]
    inside = _to_hub(rank, own, own[0], total)
    if rank != own[0]:
        return (inside, *[Round()] * (len(leaders) - 1))
    bounds = [0, *(stop for _, stop in ranges(total, len(leaders)))]
    # Equal parts, not those of `problem.bounds`: there are fewer leaders than ranks.
    return (inside, *_ring(leaders, leaders.index(rank), bounds))


def _all_reduce_whole(rank: int, problem: Problem) -> Route:
    """Every rank sends all it has to every peer and combines everything itself."""
    pieces = _pieces(peers_after(rank, problem.world_size), 0, problem.bounds[-1])
    return (Round(sends=pieces, adds=pieces),)


def peers_after(rank: int, world_size: int) -> list[int]:
    """Return all other ranks, beginning after `rank`."""
    # In rank order all ranks would send to rank 0 first, and its link would be the slowest.
    return [(rank + step) % world_size for step in range(1, world_size)]


def _part(bounds: Sequence[int], number: int) -> tuple[int, int]:
    return bounds[number], bounds[number + 1]


def _pieces(peers: Iterable[int], start: int, stop: int) -> tuple[Piece, ...]:
    return tuple(Piece(peer, start, stop) for peer in peers) if start < stop else ()


def _parts_of(peers: Iterable[int], problem: Problem) -> tuple[Piece, ...]:
    """Return the part of each peer, unless it is empty."""
    parts = (Piece(peer, *_part(problem.bounds, peer)) for peer in peers)
    return tuple(piece for piece in parts if piece.start < piece.stop)


def _then(*builders: Builder) -> Builder:
    return lambda rank, problem: sum((builder(rank, problem) for builder in builders), ())


def _reversal_of(builder: Builder) -> Builder:
    """From the last round to the first, send what was received, and receive what was sent."""
    return lambda rank, problem: tuple(
        # A combined element is complete at the end, so its way back is a copy.
        Round(sends=turn.copies + turn.adds, copies=turn.sends)
        for turn in reversed(builder(rank, problem))
    )


def _there_and_back(builder: Builder) -> Builder:
    return _then(builder, _reversal_of(builder))


def _pipelined(builder: Builder) -> Builder:
    """Cut the buffer into segments that follow each other at a distance of one round.

    While one segment is between hosts, another one is combined inside. A segment that is further on
    has the lower number, so what is copied precedes what is added, as the engine receives.
    """

    def build(rank: int, problem: Problem) -> Route:
        segments = [
            _shifted(builder(rank, problem.of_size(stop - start)), start)
            for start, stop in ranges(problem.bounds[-1], SEGMENTS)
        ]
        rounds = [[Round()] * number + list(segment) for number, segment in enumerate(segments)]
        return tuple(_merged(turns) for turns in zip_longest(*rounds, fillvalue=Round()))

    return build


def _shifted(route: Route, by: int) -> Route:
    def shifted(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(Piece(peer, start + by, stop + by) for peer, start, stop in pieces)

    return tuple(Round(*map(shifted, turn)) for turn in route)


def _merged(turns: Iterable[Round]) -> Round:
    return Round(*(sum(kinds, ()) for kinds in zip(*turns, strict=True)))


_REDUCE: Final[Mapping[str, Builder]] = {
    "tree": _reduce_tree,
    "direct": _reduce_direct,
    "ring": _then(_reduce_scatter_ring, _gather_direct),
}
_REDUCE_SCATTER: Final[Mapping[str, Builder]] = {
    "ring": _reduce_scatter_ring,
    "direct": _reduce_scatter_direct,
}

ROUTES: Final[Mapping[str, Mapping[str, Builder]]] = {
    "all_reduce": {
        "ring": _there_and_back(_reduce_scatter_ring),
        "tree": _there_and_back(_reduce_tree),
        "centralised": _there_and_back(_reduce_direct),
        "direct": _there_and_back(_reduce_scatter_direct),
        "whole": _all_reduce_whole,
        "two_level": _pipelined(_there_and_back(_reduce_two_level)),
    },
    "reduce": _REDUCE,
    "broadcast": {name: _reversal_of(builder) for name, builder in _REDUCE.items()},
    "gather": {"direct": _gather_direct},
    "scatter": {"direct": _reversal_of(_gather_direct)},
    "reduce_scatter": _REDUCE_SCATTER,
    "all_gather": {name: _reversal_of(builder) for name, builder in _REDUCE_SCATTER.items()},
}
"""Operation → name of a route → its builder."""


class Rule(NamedTuple):
    """Take `route` if all conditions hold."""

    route: str
    least_bytes: int = 0
    below_bytes: float = inf
    most_ranks: float = inf
    most_bytes_of_all: float = inf
    """The size of the buffers of all ranks together."""
    on_one_host: bool = False
    on_several_hosts: bool = False
    with_shared_links: bool = False
    """Some host has several ranks, and there are several hosts."""

    def applies(self, size_bytes: int, problem: Problem) -> bool:
        ranks, hosts = problem.world_size, len(set(problem.hosts))
        return (
            self.least_bytes <= size_bytes < self.below_bytes
            and ranks <= self.most_ranks
            and size_bytes * ranks <= self.most_bytes_of_all
            and (hosts == 1 or not self.on_one_host)
            and (hosts > 1 or not self.on_several_hosts)
            and (1 < hosts < ranks or not self.with_shared_links)
        )

    def __str__(self) -> str:
        """Return the conditions."""
        conditions = {
            f"at least {self.least_bytes / (1 << 20):g} MiB": self.least_bytes > 0,
            f"less than {self.below_bytes / (1 << 20):g} MiB": self.below_bytes < inf,
            f"at most {self.most_ranks} ranks": self.most_ranks < inf,
            f"at most {self.most_bytes_of_all / 1024:g} KiB on all ranks together": (
                self.most_bytes_of_all < inf
            ),
            "all ranks on one host": self.on_one_host,
            "several hosts": self.on_several_hosts,
            "ranks share the link of a host": self.with_shared_links,
        }
        return ", ".join(text for text, is_one in conditions.items() if is_one) or "all other cases"


_REDUCE_RULES: Final = (
    Rule("direct", most_ranks=2),
    Rule("tree", on_one_host=True),
    Rule("tree", below_bytes=LARGE_BYTES),
    Rule("ring"),
)
_SCATTER_RULES: Final = (Rule("direct", most_ranks=8), Rule("ring"))

RULES: Final[Mapping[str, tuple[Rule, ...]]] = {
    "all_reduce": (
        # Two ranks send as many bytes in one round as in two, but large scratch memory is slow.
        Rule("whole", below_bytes=LARGE_BYTES, most_ranks=2),
        Rule("whole", most_bytes_of_all=WHOLE_BYTES, on_several_hosts=True),
        Rule("two_level", least_bytes=LARGE_BYTES, with_shared_links=True),
        # On one host a message costs more than the bytes of a small one.
        Rule("tree", below_bytes=LARGE_BYTES, on_one_host=True),
        Rule("direct", on_one_host=True),
        # Between hosts, streams of many senders to one receiver slow each other down.
        Rule("direct", below_bytes=LARGE_BYTES, most_ranks=8),
        Rule("tree", below_bytes=LARGE_BYTES),
        Rule("ring"),
    ),
    "reduce": _REDUCE_RULES,
    "broadcast": _REDUCE_RULES,
    "gather": (Rule("direct"),),
    "scatter": (Rule("direct"),),
    "reduce_scatter": _SCATTER_RULES,
    "all_gather": _SCATTER_RULES,
}
"""For each operation, rules of which the first that applies is taken; the last always does."""


def choose(operation: str, size_bytes: int, problem: Problem) -> str:
    """Return the name of the route for a whole buffer of `size_bytes`, the same on all ranks."""
    return rule_of(operation, size_bytes, problem).route


def rule_of(operation: str, size_bytes: int, problem: Problem) -> Rule:
    """Return the rule by which `choose` decides."""
    return next(rule for rule in RULES[operation] if rule.applies(size_bytes, problem))
