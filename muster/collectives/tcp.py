"""A group whose ranks are all connected by sockets, over any network.

`rendezvous` connects and authenticates the ranks, `channel` defines the frames, and `multiplexer`
serves all connections in one thread.
"""

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from muster.collectives.backend import (
    MESSAGE_LIMIT_BYTES,
    TIMEOUT_SECONDS,
    Backend,
    Data,
    OnWait,
    check_length,
    check_peer,
)
from muster.collectives.channel import Channel, Kind
from muster.collectives.deadline import Deadline
from muster.collectives.errors import ChannelClosed
from muster.collectives.multiplexer import Multiplexer


class TcpBackend(Backend):
    """The `Backend` over connected stream sockets, one for each peer, which it owns.

    `on_wait` is called at least every 20 ms while a call waits; what it raises ends the call and
    leaves the backend as `TimedOut` does.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connections: Mapping[int, socket.socket],
        *,
        generation: int = 0,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        on_wait: OnWait = lambda: None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._limit_bytes = limit_bytes
        self._closed = False
        self._barriers_reached = self._barriers_passed = 0
        self._channels = {
            peer: Channel(connection, peer, generation=generation, limit_bytes=limit_bytes)
            for peer, connection in sorted(connections.items())
        }
        self._multiplexer = Multiplexer(list(self._channels.values()), on_wait)

    def send(self, peer: int, data: Data, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        deadline = Deadline(timeout_seconds, f"room for a message to rank {peer}")
        self._exchange([(peer, data)], [], deadline)

    def receive_into(
        self, peer: int, target: memoryview, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        deadline = Deadline(timeout_seconds, f"a message of rank {peer}")
        self._exchange([], [(peer, target)], deadline)

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, memoryview]],
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        deadline = Deadline(timeout_seconds, "the messages of an exchange")
        self._exchange(outgoing, incoming, deadline)

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        deadline = Deadline(timeout_seconds, "a barrier")
        self._check_open()
        channels = list(self._channels.values())
        passed = self._barriers_passed
        with self._using(channels, channels):
            if self._barriers_reached == passed:  # else an earlier call sent it, and timed out
                for channel in channels:
                    channel.put(Kind.BARRIER)
                self._barriers_reached += 1
            self._multiplexer.move(
                channels, channels, lambda channel: channel.barriers == passed, deadline
            )
        self._barriers_passed += 1

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for channel in self._channels.values():
                channel.close()

    def _exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, memoryview]],
        deadline: Deadline,
    ) -> None:
        sent = [(self._channel(peer), memoryview(data)) for peer, data in outgoing]
        for _, data in sent:
            check_length(data.nbytes, self._limit_bytes)
        wanted = [(self._channel(peer), target) for peer, target in incoming]
        senders = list(dict.fromkeys(channel for channel, _ in sent))
        receivers = list(dict.fromkeys(channel for channel, _ in wanted))
        with self._using(senders, receivers):
            for channel, target in wanted:
                channel.want(target)
            for channel, data in sent:
                channel.put(Kind.MESSAGE, data)
            self._multiplexer.move(senders, receivers, lambda channel: channel.receiving, deadline)

    def _channel(self, peer: int) -> Channel:
        check_peer(peer, self.rank, self.world_size)
        self._check_open()
        return self._channels[peer]

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(self.rank)

    @contextmanager
    def _using(self, senders: Iterable[Channel], receivers: Iterable[Channel]) -> Iterator[None]:
        """Lock the channels, and keep no reference to the caller's memory afterwards."""
        with ExitStack() as stack:
            for channel in sorted(senders, key=lambda channel: channel.peer):
                stack.enter_context(channel.writing)
                stack.callback(channel.keep_unsent)
            for channel in sorted(receivers, key=lambda channel: channel.peer):
                stack.enter_context(channel.reading)
                stack.callback(channel.stop_wanting)
            yield
