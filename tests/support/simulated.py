"""A transport between the ranks of one process: a fake that keeps the promises of `Backend`.

`SimulatedGroup.kill` simulates a death.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

from muster.collectives.backend import (
    MESSAGE_LIMIT_BYTES,
    TIMEOUT_SECONDS,
    Backend,
    Data,
    check_length,
    check_peer,
)
from muster.collectives.deadline import Deadline
from muster.collectives.errors import ChannelClosed, SizeMismatch

Result = TypeVar("Result")


class SimulatedGroup:
    """The messages in flight between all ranks, and which ranks have left or died."""

    def __init__(self, world_size: int, *, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        self.world_size = world_size
        self.limit_bytes = limit_bytes
        self.changed = Condition()
        self.mail: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.barriers_reached = [0] * world_size
        self.left: set[int] = set()
        self.dead: set[int] = set()

    def backends(self) -> list["SimulatedBackend"]:
        """Return one backend for each rank."""
        return [SimulatedBackend(self, rank) for rank in range(self.world_size)]

    def kill(self, rank: int) -> None:
        """Simulate the death of `rank`, which every other rank notices in any wait."""
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()

    def gone(self, rank: int) -> bool:
        """True if `rank` has left or died."""
        return rank in self.left or rank in self.dead


class SimulatedBackend(Backend):
    """The `Backend` of one rank of a `SimulatedGroup`."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self.rank, self.world_size = rank, group.world_size
        self._group = group
        self._barriers_passed = 0

    def send(self, peer: int, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        del timeout_seconds  # there is always room
        check_peer(peer, self.rank, self.world_size)
        message = bytes(data)
        check_length(len(message), self._group.limit_bytes)
        with self._group.changed:
            self._check_open()
            if self._group.gone(peer):
                raise ChannelClosed(peer)
            self._group.mail[self.rank, peer].append(message)
            self._group.changed.notify_all()

    def receive_into(
        self, peer: int, target: memoryview, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        check_peer(peer, self.rank, self.world_size)
        deadline = Deadline(timeout_seconds, f"a message of rank {peer}")
        with self._group.changed:
            mail = self._group.mail[peer, self.rank]
            self._wait(lambda: bool(mail), lambda: {peer}, deadline)
            if len(mail[0]) != target.nbytes:
                raise SizeMismatch(target.nbytes, len(mail[0]))
            target.cast("B")[:] = mail.popleft()

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, memoryview]],
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        deadline = Deadline(timeout_seconds, "the messages of an exchange")
        for peer, data in outgoing:
            self.send(peer, data)
        for peer, target in incoming:
            self.receive_into(peer, target, timeout_seconds=deadline.left_seconds)

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        reached = self._group.barriers_reached
        number = self._barriers_passed + 1

        def late() -> set[int]:
            return {rank for rank, passed in enumerate(reached) if passed < number}

        with self._group.changed:
            reached[self.rank] = number
            self._group.changed.notify_all()
            self._wait(lambda: not late(), late, Deadline(timeout_seconds, "a barrier"))
        self._barriers_passed = number

    def close(self) -> None:
        with self._group.changed:
            self._group.left.add(self.rank)
            self._group.changed.notify_all()

    def _wait(
        self,
        arrived: Callable[[], bool],
        needed: Callable[[], set[int]],
        deadline: Deadline,
    ) -> None:
        """Wait for `arrived`; raise if a needed rank has left or any rank has died."""
        while True:
            self._check_open()
            if arrived():
                return
            if gone := sorted(self._group.dead | (needed() & self._group.left)):
                raise ChannelClosed(gone[0])
            deadline.check()
            self._group.changed.wait(deadline.left_seconds)

    def _check_open(self) -> None:
        if self._group.gone(self.rank):
            raise ChannelClosed(self.rank)


def run_ranks(backends: Sequence[Backend], function: Callable[[Backend], Result]) -> list[Result]:
    """Run `function` for each rank in its own thread; return the results in rank order.

    A rank that returns closes its backend. If ranks fail, raises the error that came first by
    cause: not the `ChannelClosed` of ranks that only lost a peer.
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
    errors.sort(key=lambda error: isinstance(error, ChannelClosed))
    if errors:
        raise errors[0]
    return [run.result() for run in runs]
