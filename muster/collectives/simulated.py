"""All ranks in one process, each in a thread: to debug a training function in one terminal."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from muster.collectives.backend import MESSAGE_LIMIT_BYTES, Backend, Target, fill
from muster.collectives.errors import Aborted, ChannelClosed, InvalidWorldSize
from muster.collectives.transports.message_backend import MessageBackend
from muster.collectives.transports.streams import Stream

Result = TypeVar("Result")


class SimulatedBackend(MessageBackend):
    """The `Backend` of one rank of a group whose ranks are threads of this process."""

    @classmethod
    def create_group(cls, world_size: int, *, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> list[Self]:
        """Return a backend for each rank; raises `InvalidWorldSize` below 1."""
        if world_size < 1:
            raise InvalidWorldSize(world_size)
        ranks = range(world_size)
        pipes = [[_Pipe() for _ in ranks] for _ in ranks]  # by sender and receiver
        return [
            cls(
                rank,
                world_size,
                {
                    peer: _PipeStream(peer, pipes[peer][rank], pipes[rank][peer])
                    for peer in ranks
                    if peer != rank
                },
                limit_bytes=limit_bytes,
            )
            for rank in ranks
        ]

    def kill(self) -> None:
        """Let this rank die, which all others notice in any wait."""
        with self._lock:
            for channel in self._all:
                channel.stream.close()


class _Pipe:
    """One direction of a connection."""

    def __init__(self) -> None:
        # Each end is used under the lock of its own backend. Between the two ends nothing is
        # locked, as the operations of a deque are atomic.
        self.parts: deque[memoryview] = deque()
        """Sent and not received yet."""
        self.is_closed = False


class _PipeStream(Stream):
    """The stream to one peer. It takes all that is sent, so sending never waits."""

    def __init__(self, peer: int, inward: _Pipe, outward: _Pipe) -> None:
        self.peer = peer
        self._inward = inward
        self._outward = outward

    def send(self, parts: Iterable[memoryview]) -> int:
        # Part by part, so that each payload is received from its beginning, in whole elements.
        copies = [memoryview(bytes(part)) for part in parts]
        if not self._outward.is_closed:  # else one of the two has left or died
            self._outward.parts.extend(copies)
        return sum(copy.nbytes for copy in copies)

    def receive(self, target: Target, offset: int, size_bytes: int) -> int:
        if not self._inward.parts:
            return 0
        part = self._inward.parts.popleft()
        fill(target, offset, part[:size_bytes])
        if part.nbytes > size_bytes:
            self._inward.parts.appendleft(part[size_bytes:])
        return min(part.nbytes, size_bytes)

    def has_hung_up(self) -> bool:
        return self._inward.is_closed

    def close(self) -> None:
        self._inward.is_closed = self._outward.is_closed = True


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
