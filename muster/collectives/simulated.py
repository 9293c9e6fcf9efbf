"""All ranks in one process, each in a thread: to debug a training function in one terminal."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

from muster.collectives.backend import (
    MESSAGE,
    MESSAGE_LIMIT_BYTES,
    TIMEOUT_SECONDS,
    Backend,
    Data,
    Tag,
    Target,
    bytes_of,
    check_length,
    check_peer,
    fill,
)
from muster.collectives.calls import mismatch
from muster.collectives.deadline import Deadline
from muster.collectives.errors import (
    Aborted,
    ChannelClosed,
    InvalidWorldSize,
    SizeMismatch,
)

Result = TypeVar("Result")


class _Group:
    """The messages in flight between all ranks, and which ranks have left or died."""

    def __init__(self, world_size: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.changed = Condition()
        self.messages: defaultdict[tuple[int, ...], deque[tuple[int, bytes]]] = defaultdict(deque)
        """Call and data, by source, target, context and sequence."""
        self.aborts: dict[tuple[int, int], Aborted] = {}
        self.calls: dict[tuple[int, int], tuple[int, int]] = {}
        """Sequence and call of the last operation, by rank and context."""
        self.left: set[int] = set()
        self.dead: set[int] = set()
        self.everyone = frozenset(range(world_size))


class SimulatedBackend(Backend):
    """The `Backend` of one rank of a group whose ranks are threads of this process."""

    def __init__(self, rank: int, world_size: int, group: _Group) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = group

    @classmethod
    def create_group(
        cls, world_size: int, *, limit_bytes: int = MESSAGE_LIMIT_BYTES
    ) -> list["SimulatedBackend"]:
        """Return a backend for each rank; raises `InvalidWorldSize` below 1."""
        if world_size < 1:
            raise InvalidWorldSize(world_size)
        group = _Group(world_size, limit_bytes)
        return [cls(rank, world_size, group) for rank in range(world_size)]

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, Target]],
        *,
        tag: Tag = MESSAGE,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        group = self._group
        for peer, data in outgoing:
            check_peer(peer, self.rank, self.world_size)
            check_length(bytes_of(data).nbytes, group.limit_bytes)
        for peer, target in incoming:
            check_peer(peer, self.rank, self.world_size)
            if isinstance(target, memoryview):
                bytes_of(target, for_writing=True)
        with group.changed:
            self._check_open()
            if tag.sequence:
                self._begin(tag)
            for peer, data in outgoing:
                if peer in group.left:
                    raise ChannelClosed(peer)
                group.messages[self.rank, peer, *tag[:2]].append((tag.call, bytes(data)))
            group.changed.notify_all()
            deadline: Deadline | None = None
            for peer, target in incoming:
                deadline = deadline or Deadline(timeout_seconds, f"a message of rank {peer}")
                self._receive(peer, target, tag, deadline)

    def abort(self, tag: Tag, reason: str) -> None:
        with self._group.changed:
            self._group.aborts.setdefault(tag[:2], Aborted(self.rank, reason))
            self._group.changed.notify_all()

    def close(self) -> None:
        with self._group.changed:
            self._group.left.add(self.rank)
            self._group.changed.notify_all()

    def kill(self) -> None:
        """Let this rank die, which all others notice in any wait."""
        with self._group.changed:
            self._group.dead.add(self.rank)
            self._group.changed.notify_all()

    def _begin(self, tag: Tag) -> None:
        """Say what this rank calls, and drop what has come of earlier operations."""
        group, own = self._group, (self.rank, tag.context)
        if group.calls.get(own) != (tag.sequence, tag.call):
            group.calls[own] = tag.sequence, tag.call
            for key in [it for it in group.messages if it[1:3] == own and 0 < it[3] < tag.sequence]:
                del group.messages[key]

    def _receive(self, peer: int, target: Target, tag: Tag, deadline: Deadline) -> None:
        group = self._group
        key = (peer, self.rank, *tag[:2])
        while key not in group.messages:
            self._check(peer, tag)
            deadline.check()
            group.changed.wait(deadline.left_seconds)
        messages = group.messages[key]
        call, data = messages[0]
        if call != tag.call:
            raise mismatch(peer, tag.call, call)
        if len(data) != target.nbytes:
            raise SizeMismatch(target.nbytes, len(data))
        messages.popleft()
        if not messages:
            del group.messages[key]  # every operation has keys of its own
        if data:
            into = target.cast("B") if isinstance(target, memoryview) else target
            fill(into, 0, memoryview(data))

    def _check(self, peer: int, tag: Tag) -> None:
        """Raise what ends the wait for a message of `peer` that has not come."""
        group = self._group
        self._check_open()
        dead = group.dead & (group.everyone if tag.members is None else tag.members)
        if gone := sorted(dead | ({peer} & group.left)):
            raise ChannelClosed(gone[0])
        if tag[:2] in group.aborts:
            raise group.aborts[tag[:2]]
        for source in group.everyone:
            for call, _ in group.messages.get((source, self.rank, *tag[:2]), ()):
                if call != tag.call:
                    raise mismatch(source, tag.call, call)
        # The peer may wait for this rank, or has gone on, and will never send what is awaited.
        sequence, call = group.calls.get((peer, tag.context), (0, 0))
        if sequence >= tag.sequence > 0 and (sequence, call) != (tag.sequence, tag.call):
            raise mismatch(peer, tag.call, call, is_later=sequence > tag.sequence)

    def _check_open(self) -> None:
        if self.rank in self._group.left | self._group.dead:
            raise ChannelClosed(self.rank)


def run_ranks(backends: Sequence[Backend], function: Callable[[Backend], Result]) -> list[Result]:
    """Run `function` for each rank in its own thread; return the results in rank order.

    A rank that returns closes its backend. If ranks fail, raises the error that came first by
    cause: not the `ChannelClosed` or `Aborted` of ranks that only lost a peer.
    """
    errors: list[Exception] = []

    def run(backend: Backend) -> Result:
        try:
            return function(backend)
        except Exception as error:
            errors.append(error)
            raise
        finally:
            backend.close()

    with ThreadPoolExecutor(max_workers=len(backends)) as threads:
        runs = [threads.submit(run, backend) for backend in backends]
    errors.sort(key=lambda error: isinstance(error, ChannelClosed | Aborted))
    if errors:
        raise errors[0]
    return [run.result() for run in runs]
