"""The memory of a host's ranks as an agent hands it out, for tests."""

import os
from collections.abc import Callable

from muster.collectives.reduction.arena_reducer import ArenaReducer
from muster.collectives.transports.arena import Arena, Geometry
from muster.collectives.transports.flags import Flags
from muster.collectives.transports.shared_memory import SharedMemoryBackend


def nothing() -> None:
    """An `on_wait` that does nothing."""


def unreachable(_: float) -> None:
    raise AssertionError("slept where nothing had to be waited for")


class Host:
    """An arena per rank. Each writes to its own; the others see it read-only."""

    def __init__(
        self, ranks: int, *, elements: int = 1, slot_count: int = 1, ring_bytes: int = 4096
    ) -> None:
        self.geometry = Geometry(slot_count=slot_count, elements=elements, ring_bytes=ring_bytes)
        memories = [os.memfd_create("arena") for _ in range(ranks)]
        self.own = [Arena.create(memory, self.geometry) for memory in memories]
        self.seen = [Arena.attach(memory) for memory in memories]
        for memory in memories:
            os.close(memory)

    def flags(
        self,
        rank: int,
        *,
        generation: int = 1,
        members: list[int] | None = None,
        on_wait: Callable[[], None] = nothing,
        sleep: Callable[[float], None] | None = None,
    ) -> Flags:
        """Let the owner of arena `rank` take up a generation of `members`, all by default."""
        chosen = range(len(self.own)) if members is None else members
        seam = {} if sleep is None else {"sleep": sleep}
        return Flags(
            arenas=[(self.own if each == rank else self.seen)[each] for each in chosen],
            rank=list(chosen).index(rank),
            generation=generation,
            on_wait=on_wait,
            **seam,
        )

    def backends(self, **options: object) -> list[SharedMemoryBackend]:
        return [SharedMemoryBackend(self.flags(rank, **options)) for rank in range(len(self.own))]

    def reducers(self, flags: list[Flags]) -> list[ArenaReducer]:
        """Return the reducers of one group, which share a result of their own."""
        result = os.memfd_create("result")
        try:
            return [ArenaReducer(each, result) for each in flags]
        finally:
            os.close(result)
