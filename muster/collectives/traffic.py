"""Moves what is to be moved over many channels at once, in one thread.

While it sends it receives, so nobody waits for somebody's buffer to empty; and while it waits for
one peer it watches the others, so that a death is noticed at once. One thread that polls is faster
than a sending and a receiving one up to 16 MB, and as fast above.
"""

import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Final

from muster.collectives.backend import ATTENTION_SECONDS, Attention
from muster.collectives.channel import Channel
from muster.collectives.deadline import Deadline
from muster.collectives.errors import ChannelClosed

HANG_UP: Final = getattr(select, "POLLRDHUP", 0)
"""The peer will send nothing more, though what it sent may not have been read. Linux tells."""


class Traffic:
    """All channels of one rank; several threads may move things on different ones."""

    def __init__(self, channels: Sequence[Channel], attention: Attention) -> None:
        self._channels = channels
        self._attention = attention
        self._by_descriptor = {channel.fileno(): channel for channel in channels}

    def move(
        self,
        senders: Sequence[Channel],
        receivers: Sequence[Channel],
        waiting: Callable[[Channel], bool],
        deadline: Deadline,
    ) -> None:
        """Return when the senders have sent all and no receiver is `waiting` any more.

        The caller holds the senders' `writing` and the receivers' `reading`.
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
        """Yield the channels on which an earlier call left something that has to go out."""
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
        """Return when something can move or is worth a look; raise for whoever dies meanwhile."""
        self._attention()
        deadline.check()
        poll = select.poll()
        for channel in self._channels:
            if not channel.left:
                poll.register(channel, _events(channel, sending, receiving))
        seconds = min(deadline.left_seconds, ATTENTION_SECONDS)
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
    """Return what to wait for. A peer that takes nothing may have to be read from first."""
    events = HANG_UP
    if channel in sending:
        events |= select.POLLOUT
    if channel in receiving or (channel in sending and not channel.full):
        events |= select.POLLIN
    return events


def _read_ahead(channel: Channel) -> None:
    """Keep what has come, to its end if it has one; another thread that reads does so itself."""
    if channel.reading.acquire(blocking=False):
        try:
            while not channel.left and channel.read_some():
                pass
        finally:
            channel.reading.release()
