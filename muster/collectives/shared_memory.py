"""A `Backend` between the ranks of one host through shared memory, without system calls."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from muster.collectives.arena import BARRIER
from muster.collectives.backend import (
    MESSAGE_LIMIT_BYTES,
    TIMEOUT_SECONDS,
    Backend,
    Data,
    check_length,
    check_peer,
)
from muster.collectives.deadline import Deadline
from muster.collectives.errors import ChannelClosed
from muster.collectives.flags import Flags
from muster.collectives.rings import Inbox, Outbox, Receiving, Sending

Transfer: TypeAlias = Sending | Receiving


class SharedMemoryBackend(Backend):
    """One group of one generation. Messages that a peer sent before it left can be received."""

    def __init__(self, flags: Flags, *, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        self.rank, self.world_size = flags.rank, flags.world_size
        self._flags = flags
        self._limit_bytes = limit_bytes
        peers = [peer for peer in range(flags.world_size) if peer != flags.rank]
        self._outboxes = {peer: Outbox(flags, peer) for peer in peers}
        self._inboxes = {peer: Inbox(flags, peer) for peer in peers}
        self._barriers = 0

    def send(self, peer: int, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        sending = self._sending(peer, data)
        deadline = Deadline(timeout_seconds, f"room for a message to rank {peer}")
        self._carry_out([sending], deadline, meanwhile=self._inboxes[peer].spill)

    def receive_into(
        self, peer: int, target: memoryview, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        receiving = self._receiving(peer, target)
        self._carry_out([receiving], Deadline(timeout_seconds, f"a message of rank {peer}"))

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, memoryview]],
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        deadline = Deadline(timeout_seconds, "the messages of an exchange")
        sendings = [self._sending(peer, data) for peer, data in outgoing]
        receivings = [self._receiving(peer, target) for peer, target in incoming]
        self._carry_out([*sendings, *receivings], deadline)

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._flags.check_open()
        # Counted at the end, so that a barrier that timed out can be called again.
        barrier = self._barriers + 1
        self._flags.raise_to(BARRIER, barrier)
        self._flags.wait_for_all(BARRIER, barrier, Deadline(timeout_seconds, "a barrier"))
        self._barriers = barrier

    def close(self) -> None:
        self._flags.close()

    def _sending(self, peer: int, data: Data) -> Sending:
        self._check(peer)
        message = memoryview(data).cast("B")
        check_length(message.nbytes, self._limit_bytes)
        if self._flags.is_closed(peer):
            raise ChannelClosed(peer)
        return Sending(self._outboxes[peer], message, peer)

    def _receiving(self, peer: int, target: memoryview) -> Receiving:
        self._check(peer)
        return Receiving(self._inboxes[peer], target.cast("B"), peer)

    def _carry_out(
        self,
        transfers: Iterable[Transfer],
        deadline: Deadline,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Move all transfers concurrently, and those of one kind and peer in order."""
        lines: defaultdict[tuple[type, int], deque[Transfer]] = defaultdict(deque)
        for transfer in transfers:
            lines[type(transfer), transfer.peer].append(transfer)

        def stuck() -> list[int]:
            heads = [line[0] for line in lines.values()]
            if any(head.can_move() for head in heads):
                return []
            meanwhile()
            return [head.peer for head in heads]

        try:
            while lines:
                self._flags.wait(stuck, deadline)
                for key in [key for key, line in lines.items() if line[0].can_move()]:
                    if lines[key][0].move():
                        lines[key].popleft()
                lines = defaultdict(deque, {key: line for key, line in lines.items() if line})
        except BaseException:
            for line in lines.values():
                if line:
                    line[0].interrupt()
            raise

    def _check(self, peer: int) -> None:
        check_peer(peer, self.rank, self.world_size)
        self._flags.check_open()
