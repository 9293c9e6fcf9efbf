"""The fixed tree of sums, which is the same for every assignment of its blocks to ranks.

Leaves are numbered 0 … V-1, V a power of two. Node (level, number) is the sum of the leaves
[number·2^level, (number+1)·2^level), and is always left + right of its two halves. A float32
addition is commutative but not associative: fixing the tree fixes the bits, for every number of
ranks and every history of failures.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from muster.contracts.shards import ranges


class Block(NamedTuple):
    """A node of the tree, and the aligned range of leaves below it."""

    level: int
    number: int

    @property
    def start(self) -> int:
        return self.number << self.level

    @property
    def stop(self) -> int:
        return (self.number + 1) << self.level

    @property
    def size(self) -> int:
        return 1 << self.level

    @property
    def halves(self) -> "tuple[Block, Block]":
        """The two nodes whose sum this one is, left operand first."""
        return Block(self.level - 1, 2 * self.number), Block(self.level - 1, 2 * self.number + 1)

    def below(self, level: int) -> "Block":
        """Return this node as one of the tree whose root is the node of `level` above it."""
        return Block(self.level, self.number & (1 << level - self.level) - 1)


BlockAssignment: TypeAlias = Sequence[Sequence[Block]]
"""The blocks of each rank, in slot order. Together they cover all leaves once."""


def root_of(leaves: int) -> Block:
    """Return the root of `leaves` leaves; raises ValueError unless that is a power of two."""
    if leaves < 1 or leaves & (leaves - 1):
        raise ValueError(f"{leaves} leaves do not make a balanced tree: use a power of two")
    return Block(leaves.bit_length() - 1, 0)


def blocks_of_range(start: int, stop: int) -> Iterator[Block]:
    """Yield the fewest nodes that cover exactly the leaves [start, stop), left to right."""
    while start < stop:
        # The largest power of two that divides `start`: no larger node begins there. At leaf 0
        # nodes of every size do.
        alignment = start & -start if start else stop - start
        size = min(alignment, stop - start)
        level = size.bit_length() - 1
        yield Block(level, start >> level)
        start += 1 << level


def nodes_of(leaves: Iterable[int]) -> tuple[Block, ...]:
    """Return the fewest nodes that cover exactly these leaves, left to right."""
    runs = _runs([Block(0, leaf) for leaf in sorted(leaves)])
    return tuple(node for start, stop in runs for node in blocks_of_range(start, stop))


def gaps(held: Iterable[Block], leaves: int) -> list[Block]:
    """Return the fewest nodes that cover exactly the leaves below none of `held`."""
    missing: list[Block] = []
    at = 0
    for block in sorted(held, key=lambda block: block.start):
        missing += blocks_of_range(at, block.start)
        at = block.stop
    return [*missing, *blocks_of_range(at, leaves)]


def assign_blocks(
    held: Sequence[Sequence[Block]], leaves: int, groups: int = 0, hosts: Sequence[int] = ()
) -> list[tuple[Block, ...]]:
    """Return the blocks of each rank: those it holds, and its part of those that no rank holds.

    The leaves below no held block are cut, from left to right, into one contiguous part per rank,
    equal to within one leaf (`ranges`). Every rank computes the same assignment.

    With `groups`, each of so many equal subtrees lies on one host, and no block is above one.
    `hosts` has the host of each rank. A group that is begun stays where it is. Of the others each
    host gets one, as far as they go, and then as it has ranks, which share its leaves.
    """
    missing = gaps((block for blocks in held for block in blocks), leaves)
    if not groups:
        return _deal(held, missing)
    size, hosts = leaves // groups, hosts or [0] * len(held)
    begun = zip(hosts, held, strict=True)
    owners = {block.start // size: host for host, blocks in begun for block in blocks}
    free = [group for group in range(groups) if group not in owners]
    counts, ranks = dict.fromkeys(hosts, 0) | Counter(owners.values()), Counter(hosts)
    wanted = dict.fromkeys(counts, 0)
    for _ in free:
        host = min(counts, key=lambda host: (counts[host] > 0, (counts[host] + 1) / ranks[host]))
        counts[host] += 1
        wanted[host] += 1
    dealt = iter(free)
    for host, count in wanted.items():  # contiguous, so that a host has few nodes above its groups
        owners |= dict.fromkeys(islice(dealt, count), host)
    missing = [part for block in missing for part in _cut(block, size)]
    assigned: list[tuple[Block, ...]] = [()] * len(held)
    for host in counts:
        members = [rank for rank, place in enumerate(hosts) if place == host]
        share = [block for block in missing if owners[block.start // size] == host]
        parts = _deal([held[rank] for rank in members], share)
        for rank, blocks in zip(members, parts, strict=True):
            assigned[rank] = tuple(part for block in blocks for part in _cut(block, size))
    return assigned


def _cut(block: Block, size: int) -> Iterator[Block]:
    """Yield the nodes of at most so many leaves that a block consists of."""
    for start in range(block.start, block.stop, size):
        yield from blocks_of_range(start, min(start + size, block.stop))


def _deal(held: Sequence[Sequence[Block]], missing: Sequence[Block]) -> list[tuple[Block, ...]]:
    sizes = [stop - start for start, stop in ranges(sum(b.size for b in missing), len(held))]
    assigned = [list(blocks) for blocks in held]
    rank, left = 0, sizes[0]
    for start, stop in _runs(missing):
        at = start
        while at < stop:
            # Not `if`: parts are empty where there are more ranks than missing leaves.
            while left == 0:
                rank += 1
                left = sizes[rank]
            end = min(stop, at + left)
            assigned[rank] += blocks_of_range(at, end)
            left -= end - at
            at = end
    return [tuple(blocks) for blocks in assigned]


def isolate(block: Block, leaves: Collection[int]) -> Iterator[Block]:
    """Yield the fewest nodes that cover exactly `block` and have each of `leaves` as a node."""
    if block.level == 0 or not any(block.start <= leaf < block.stop for leaf in leaves):
        yield block
        return
    for half in block.halves:
        yield from isolate(half, leaves)


def _runs(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Yield the ranges that adjacent `blocks`, in order, form."""
    start = stop = 0
    for block in blocks:
        if block.start != stop:
            yield start, stop
            start = block.start
        stop = block.stop
    yield start, stop
