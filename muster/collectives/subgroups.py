"""Backends made of other backends: a view of some ranks, and two transports as one."""

from collections.abc import Iterable, Sequence
from typing import Final
from weakref import WeakKeyDictionary

import xxhash

from muster.collectives.backend import (
    BARRIER_BIT,
    MESSAGE,
    TIMEOUT_SECONDS,
    Backend,
    Data,
    Tag,
    Target,
)
from muster.collectives.errors import InvalidRank, InvalidWorldSize

_created: Final[WeakKeyDictionary[Backend, dict[tuple[int, ...], int]]] = WeakKeyDictionary()
"""How many views of the same ranks each backend has: their contexts have to differ."""


class SubBackend(Backend):
    """Some ranks of another backend as a group of their own.

    Its messages never match those of the parent or of another view: every frame carries a context,
    which all members compute alike if they create their views of the same ranks in the same order.
    """

    def __init__(self, parent: Backend, ranks: Iterable[int]) -> None:
        """`ranks` are those of the parent; they are sorted, and counted once.

        Raises `InvalidWorldSize` without a member, and `InvalidRank` for a rank that the parent
        does not have, or if this rank is not a member.
        """
        members = tuple(sorted(set(ranks)))
        if not members:
            raise InvalidWorldSize(0)
        for rank in (members[0], members[-1]):
            if not 0 <= rank < parent.world_size:
                raise InvalidRank(rank, parent.world_size)
        if parent.rank not in members:
            raise InvalidRank(parent.rank, len(members))
        counts = _created.setdefault(parent, {})
        number = counts[members] = counts.get(members, 0) + 1
        self.rank = members.index(parent.rank)
        self.world_size = len(members)
        self.hosts = tuple(parent.hosts[rank] for rank in members) if parent.hosts else ()
        self.depth = parent.depth + 1
        self._parent = parent
        self._members = members
        # 63 bits of a hash: no rank has to ask another one for a number that is free.
        text = f"{self.depth} {members} {number}"
        self._context = xxhash.xxh3_64_intdigest(text.encode()) & ~BARRIER_BIT

    def members(self) -> list[int]:
        """Return the parent's ranks of all members, ascending."""
        return list(self._members)

    def to_global(self, rank: int) -> int:
        """Return the parent's rank of member `rank`; raises `InvalidRank`."""
        if not 0 <= rank < self.world_size:
            raise InvalidRank(rank, self.world_size)
        return self._members[rank]

    def to_local(self, rank: int) -> int | None:
        """Return the member that is the parent's `rank`, or None if it is none."""
        return self._members.index(rank) if rank in self._members else None

    def parent(self) -> Backend:
        return self._parent

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, Target]],
        *,
        tag: Tag = MESSAGE,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._parent.exchange(
            [(self.to_global(peer), data) for peer, data in outgoing],
            [(self.to_global(peer), target) for peer, target in incoming],
            tag=self._in_parent(tag),
            timeout_seconds=timeout_seconds,
        )

    def probe(self, tag: Tag = MESSAGE, *, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
        source = self._parent.probe(self._in_parent(tag), timeout_seconds=timeout_seconds)
        return self._members.index(source)

    def abort(self, tag: Tag, reason: str) -> None:
        self._parent.abort(self._in_parent(tag), reason)

    def counters(self) -> dict[str, float]:
        """Return those of the transport, which other groups may use as well."""
        return self._parent.counters()

    def close(self) -> None:
        """Do nothing: the connections belong to the backend that was made with them."""

    def _in_parent(self, tag: Tag) -> Tag:
        inner = self._members
        if tag.members is not None:  # of a view of this one
            inner = tuple(self._members[rank] for rank in tag.members)
        # XOR, so that the contexts of views of views mix and `BARRIER_BIT` stays.
        return tag._replace(context=tag.context ^ self._context, members=frozenset(inner))


class HybridBackend(Backend):
    """Messages between two ranks by one backend, collectives and barriers by another one."""

    def __init__(self, point_to_point: Backend, collectives: Backend) -> None:
        """Take both over. Raises `InvalidRank` if they do not have the same ranks."""
        if (point_to_point.rank, point_to_point.world_size) != (
            collectives.rank,
            collectives.world_size,
        ):
            raise InvalidRank(collectives.rank, point_to_point.world_size)
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.hosts = collectives.hosts
        self.depth = 1 + max(point_to_point.depth, collectives.depth)
        self._point_to_point = point_to_point
        self._collectives = collectives

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, Target]],
        *,
        tag: Tag = MESSAGE,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        chosen = self._chosen(tag)
        chosen.exchange(outgoing, incoming, tag=tag, timeout_seconds=timeout_seconds)

    def abort(self, tag: Tag, reason: str) -> None:
        self._chosen(tag).abort(tag, reason)

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._collectives.barrier(timeout_seconds=timeout_seconds)

    def counters(self) -> dict[str, float]:
        """Return the sums of those of both backends."""
        counted = self._collectives.counters()
        for name, value in self._point_to_point.counters().items():
            counted[name] = counted.get(name, 0) + value
        return counted

    def close(self) -> None:
        self._point_to_point.close()
        self._collectives.close()

    def _chosen(self, tag: Tag) -> Backend:
        # Only messages between two ranks have no sequence.
        return self._collectives if tag.sequence else self._point_to_point
