"""Sends and receives over many channels at once, in one thread.

It receives while it sends, so two ranks cannot block each other with full buffers; and while it
waits for one peer it polls the others, so a death is noticed at once. One polling thread is faster
than a sending and a receiving thread up to 16 MB, and as fast above.
"""

import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Final

from muster.collectives.backend import ON_WAIT_SECONDS, OnWait
from muster.collectives.channel import Channel
from muster.collectives.deadline import Deadline
from muster.collectives.errors import ChannelClosed

HANG_UP: Final = getattr(select, "POLLRDHUP", 0)
"""Linux: the peer has closed its sending side; data it sent may still be unread."""


class Multiplexer:
    """All channels of one rank; several threads may use different channels."""

    def __init__(self, channels: Sequence[Channel], on_wait: OnWait) -> None:
        self._channels = channels
        self.on_wait = on_wait
        self._by_descriptor = {channel.fileno(): channel for channel in channels}

    def move(
        self,
        senders: Sequence[Channel],
        receivers: Sequence[Channel],
        waiting: Callable[[Channel], bool],
        deadline: Deadline,
    ) -> None:
        """Return when the senders have sent everything and no receiver is `waiting`.

        The caller holds the senders' `writing` and the receivers' `reading` lock.
        """
        with self._backlog(senders) as backlog:
            while True:
                sending = [channel for channel in senders if channel.sending]
                receiving = [channel for channel in receivers if waiting(channel)]
                if not sending and not receiving:
                    return
                sending += [channel for channel in backlog if channel.sending]
                moved = [_send(channel) for channel in sending]
                moved += [_read(channel) for channel in receiving]
                if not any(moved):
                    self._wait(sending, receiving, deadline)

    @contextmanager
    def _backlog(self, senders: Sequence[Channel]) -> Iterator[list[Channel]]:
        """Yield channels with unsent data of an earlier call."""
        backlog = [
            channel
            for channel in self._channels
            if channel.sending
            and not channel.left
            and channel not in senders
            and channel.writing.acquire(blocking=False)
        ]
        try:
            yield backlog
        finally:
            for channel in backlog:
                channel.writing.release()

    def _wait(
        self, sending: Sequence[Channel], receiving: Sequence[Channel], deadline: Deadline
    ) -> None:
        """Wait until a channel is ready; raise if a peer dies meanwhile."""
        self.on_wait()
        deadline.check()
        poll = select.poll()
        for channel in self._channels:
            if not channel.left:
                poll.register(channel, _events(channel, sending, receiving))
        seconds = min(deadline.left_seconds, ON_WAIT_SECONDS)
        for descriptor, events in poll.poll(ceil(seconds * 1000)):
            channel = self._by_descriptor[descriptor]
            if channel not in receiving and events & ~select.POLLOUT:
                _read_ahead(channel)


def _send(channel: Channel) -> bool:
    if channel.left:
        raise ChannelClosed(channel.peer)
    return channel.send_some()


def _read(channel: Channel) -> bool:
    if channel.left:
        raise ChannelClosed(channel.peer)
    return channel.read_some()


def _events(channel: Channel, sending: Sequence[Channel], receiving: Sequence[Channel]) -> int:
    """Return the poll events of a channel. A blocked peer may first have to be read from."""
    events = HANG_UP
    if channel in sending:
        events |= select.POLLOUT
    if channel in receiving or (channel in sending and not channel.full):
        events |= select.POLLIN
    return events


def _read_ahead(channel: Channel) -> None:
    """Buffer what has arrived, unless another thread reads the channel."""
    if channel.reading.acquire(blocking=False):
        try:
            while not channel.left and channel.read_some():
                pass
        finally:
            channel.reading.release()
