"""Which way round the nodes of a household make a ring, and when a link is measured. No I/O.

All that goes round a ring goes over each of its links, so a ring is as fast as its slowest link.
The best order is a bottleneck travelling salesman's
(https://en.wikipedia.org/wiki/Bottleneck_traveling_salesman_problem): exact for few nodes by
dynamic programming over subsets (Held and Karp, 1962), else by nearest neighbours and 2-opt.
The same nodes and links give the same ring on every node.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Annotated, Final, TypeAlias

import msgspec

DEFAULT_BYTES_PER_SECOND: Final = 10e6
"""Of a link that is not measured yet: slow Wi-Fi, so that a measured link is preferred."""

EXACT_NODES: Final = 9
"""Up to here all orders are compared."""

STARTS: Final = 16
"""Nodes from which nearest neighbours are followed beyond that: the best of them counts."""

START_LIMIT: Final = 4096
"""Of starts times the square of nodes: the thread that takes the time also sends the beats."""

MEASURE_AGAIN_SECONDS: Final = 24 * 3600.0

Bandwidths: TypeAlias = Mapping[tuple[str, str], float]
"""Bytes a second by pair, lower id first."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has."""

    cores: int
    """That a rank may use."""
    ram_mb: int
    gpu_memory_mb: int
    """Of all GPUs together."""
    chip: str
    """Such as x86_64."""
    slots: int = 0
    """How many ranks may run there at once."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured between two nodes."""

    nodes: tuple[str, str]
    """Lower id first."""
    bytes_per_second: Annotated[float, msgspec.Meta(gt=0, le=1e12)]
    """No NaN: it has no place in an order, and nodes pass it on to each other."""
    measured_at: float
    """Seconds since 1970, by the clock of the node with the lower id."""
    addresses: frozenset[str]
    """Of both nodes at that time."""


def ring(nodes: Collection[str], bandwidths: Bandwidths) -> tuple[str, ...]:
    """Return the order in which the slowest link of the ring is as fast as can be.

    It starts at the lowest id, in the direction whose second id is lower; of equal rings the first
    in the order of ids is taken. Beyond 9 nodes it is a good order, not always the best.
    """
    ids = sorted(nodes)
    return (_exact if len(ids) <= EXACT_NODES else improved_ring)(ids, bandwidths)


def improved_ring(ids: Sequence[str], bandwidths: Bandwidths) -> tuple[str, ...]:
    """Return a good ring of at least three nodes, whose ids are sorted, in the same form."""
    starts = ids[: max(1, min(STARTS, START_LIMIT // len(ids) ** 2))]
    found = [_improve(_nearest(start, ids, bandwidths), bandwidths) for start in starts]
    return min(found, key=lambda order: (-slowest(order, bandwidths), order))


def slowest(order: tuple[str, ...], bandwidths: Bandwidths) -> float:
    """Return the bytes a second of the slowest link of a ring of at least two nodes."""
    return min(_speed(*pair, bandwidths) for pair in zip(order, order[1:] + order[:1], strict=True))


def is_due(own: str, peer: str, last: Link | None, addresses: frozenset[str], now: float) -> bool:
    """Return whether node `own` measures its link with a peer; ask only while both are idle.

    The lower id of a pair measures: once when they meet first, and again after one of their
    `addresses` has changed, at most once a day.
    """
    is_old = last is None or now >= last.measured_at + MEASURE_AGAIN_SECONDS
    return own < peer and is_old and (last is None or addresses != last.addresses)


def _speed(one: str, other: str, bandwidths: Bandwidths) -> float:
    pair = (one, other) if one < other else (other, one)
    return bandwidths.get(pair, DEFAULT_BYTES_PER_SECOND)


def _exact(ids: Sequence[str], bandwidths: Bandwidths) -> tuple[str, ...]:
    @cache
    def best(last: str, rest: frozenset[str]) -> float:
        """The slowest link of the best way from `last` through `rest` to the first node."""
        if not rest:
            return _speed(last, ids[0], bandwidths)
        return max(through(last, following, rest) for following in rest)

    def through(last: str, following: str, rest: frozenset[str]) -> float:
        return min(_speed(last, following, bandwidths), best(following, rest - {following}))

    order, rest = list(ids[:1]), frozenset(ids[1:])
    bottleneck = best(ids[0], rest) if rest else 0.0
    while rest:
        order.append(min(one for one in rest if through(order[-1], one, rest) >= bottleneck))
        rest -= {order[-1]}
    return tuple(order)


def _nearest(start: str, ids: Sequence[str], bandwidths: Bandwidths) -> list[str]:
    order, rest = [start], set(ids) - {start}
    while rest:
        order.append(min(rest, key=lambda one: (-_speed(order[-1], one, bandwidths), one)))
        rest.remove(order[-1])
    return order


def _improve(order: list[str], bandwidths: Bandwidths) -> tuple[str, ...]:
    """Turn parts of a ring round while the slower of the two links at the ends becomes faster."""

    def gain(ends: tuple[int, int]) -> float:
        before, first, last, after = (order[at] for at in (ends[0] - 1, *ends, ends[1] - size + 1))
        new = min(_speed(before, last, bandwidths), _speed(first, after, bandwidths))
        return new - min(_speed(before, first, bandwidths), _speed(last, after, bandwidths))

    size, lowest = len(order), order.index(min(order))
    order = order[lowest:] + order[:lowest]
    pairs = list(combinations(range(1, size), 2))
    # Each turn replaces a link by two that are faster, so no ring comes twice.
    while gain(best := max(pairs, key=gain)) > 0:
        order[best[0] : best[1] + 1] = order[best[0] : best[1] + 1][::-1]
    return min(tuple(order), (order[0], *order[:0:-1]))
