"""Moves messages over one channel for each peer, whatever stream carries it.

Any thread that waits moves the messages of all: it receives while it sends, so two ranks cannot
block each other with full buffers, and looks after all peers, so a death is noticed at once. One
polling thread is faster than a sending and a receiving thread up to 16 MB, and as fast above.

One lock guards all channels. A thread holds it while it moves data and gives it up to wait. Where
all peers are sockets one thread polls for all; where some are shared memory, which no system call
can wait for, each thread yields the core and then sleeps in short pauses.
"""

import io
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf
from threading import Condition, Lock
from typing import Final
from weakref import WeakSet

from muster.collectives.backend import (
    MESSAGE,
    MESSAGE_LIMIT_BYTES,
    ON_WAIT_SECONDS,
    TIMEOUT_SECONDS,
    Backend,
    Data,
    OnWait,
    Tag,
    Target,
)
from muster.collectives.deadline import Deadline
from muster.collectives.errors import (
    ChannelClosed,
    CollectiveError,
    InvalidRank,
    NoConnection,
    SelfMessage,
    Unsupported,
)
from muster.collectives.transports.channel import REASON_BYTES, Channel, Kind, PostedReceive
from muster.collectives.transports.flags import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, SPINS
from muster.collectives.transports.streams import HANG_UP, Stream

ANNOUNCE_SECONDS: Final = 0.05
"""A rank that waits for this long says what it called. If ranks called different operations, each
may wait for what another one never sends."""


SILENCE_CHECK_ATTEMPTS: Final = 50
"""After so many polls without news, about a second, all peers are looked after: a connection whose
host is gone is never ready."""


@dataclass(slots=True)
class _Traffic:
    """What calls have sent and received, as the callers see it; of the backend's lock."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    errors: int = 0


class MessageBackend(Backend):
    """A `Backend` over streams, one for each peer, which it owns.

    `on_wait` is called at least every 20 ms while a call waits; what it raises ends the call and
    leaves the backend as `Timeout` does.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        streams: Mapping[int, Stream],
        *,
        generation: int = 0,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        on_wait: OnWait = lambda: None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.on_wait = on_wait
        self._limit_bytes = limit_bytes
        self._is_closed = False
        self._channels = {
            peer: Channel(stream, generation=generation, limit_bytes=limit_bytes)
            for peer, stream in sorted(streams.items())
        }
        self._all = tuple(self._channels.values())
        self._traffic = _Traffic()
        self._lock = Lock()
        self._moved = Condition(self._lock)
        self._is_polled = False
        self._followers = 0
        """Threads that wait for the one that polls."""
        self._must_spin = not all(stream.fileno() >= 0 for stream in streams.values())
        self._wake: io.FileIO | None = None
        """Ends the poll of another thread, which does not know of this thread's messages."""
        _backends.add(self)
        if streams and not self._must_spin:
            self._wake = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, Target]],
        *,
        tag: Tag = MESSAGE,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        sent = [(self._channel(peer), self._checked(data)) for peer, data in outgoing]
        targets = [(self._channel(peer), _target_of(target)) for peer, target in incoming]
        transfer = _Transfer(tag)
        with self._lock:
            try:
                if tag.sequence:
                    for channel in self._all:
                        channel.begin(tag)
                # Receives first: what comes while we send then needs no memory of its own.
                for channel, target in targets:
                    transfer.receives.append((channel, channel.post_receive(tag, target)))
                for channel, view in sent:
                    # The last one stands for those before it: a channel sends them in order.
                    transfer.send_ends[channel] = channel.put(tag, view)
                self._move(transfer, timeout_seconds)
            except CollectiveError:
                self._traffic.errors += 1
                raise
            except BaseException:
                # Of a signal or of `on_wait`. The latter is called while nothing is half moved.
                if not transfer.is_waiting:
                    self._break()
                raise
            finally:
                self._withdraw(transfer)
                self._tell_followers()
            traffic = self._traffic
            traffic.messages_sent += len(sent)
            traffic.messages_received += len(targets)
            traffic.bytes_sent += sum(view.nbytes for _, view in sent)
            traffic.bytes_received += sum(target.nbytes for _, target in targets)

    def counters(self) -> dict[str, float]:
        return {f"network.{name}": value for name, value in asdict(self._traffic).items()}

    def probe(self, tag: Tag = MESSAGE, *, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
        transfer, deadline = _Transfer(tag), Deadline(timeout_seconds, "a message of any rank")
        attempts = SPINS
        with self._lock:
            while not self._is_closed:
                self._move_some()
                for channel in self._all:
                    if channel.offers(tag):
                        return channel.peer
                if all(channel.has_left for channel in self._all):
                    raise ChannelClosed(next(iter(self._channels)))
                attempts += 1
                self._wait(transfer, attempts, deadline)
        raise ChannelClosed(self.rank, is_own=True)

    def abort(self, tag: Tag, reason: str) -> None:
        text = memoryview(reason.encode()[:REASON_BYTES])
        with self._lock:
            for channel in () if self._is_closed else self._members(tag):
                channel.send_control(tag, Kind.ABORT, text)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for channel in self._all:
                    channel.close()
                if self._wake is not None:
                    self._wake.close()

    def leave_to_parent(self) -> None:
        """Close this copy of the backend, in a child of the process that uses it.

        What a child sent would count as a message of its parent, sealed with the same nonce, and
        its copies of the sockets would hide the end of the parent.
        """
        self._lock = Lock()  # a thread of the parent may have held the other one
        self._is_closed = True
        for channel in self._all:
            channel.stream.leave_to_parent()

    def _checked(self, data: Data) -> memoryview:
        view = _bytes_of(data)
        if view.nbytes > self._limit_bytes:
            raise Unsupported(
                f"a message of {view.nbytes} bytes is longer than the limit of "
                f"{self._limit_bytes}: send it in parts"
            )
        return view

    def _channel(self, peer: int) -> Channel:
        if not 0 <= peer < self.world_size:
            raise InvalidRank(peer, self.world_size)
        if peer == self.rank:
            raise SelfMessage(peer)
        if peer not in self._channels:
            raise NoConnection(peer)
        return self._channels[peer]

    def _members(self, tag: Tag) -> Sequence[Channel]:
        if tag.members is None:
            return self._all
        return [channel for channel in self._all if channel.peer in tag.members]

    def _move(self, transfer: "_Transfer", timeout_seconds: float) -> None:
        """Return when everything is sent and received; the lock is held."""
        if self._is_closed:
            raise ChannelClosed(self.rank, is_own=True)
        if not transfer.receives and not transfer.send_ends:
            return
        deadline: Deadline | None = None
        attempts = 0
        while True:
            has_moved = self._move_some()
            if transfer.is_done():
                return
            if has_moved:
                attempts = 0
                continue
            if deadline is None:
                # Not before: an exchange whose messages are there already reads no clock.
                deadline = Deadline(timeout_seconds, transfer.waited_for())
                transfer.announces_at = time.monotonic() + ANNOUNCE_SECONDS
                if self._is_polled and self._wake is not None:
                    os.eventfd_write(self._wake.fileno(), 1)
                # A stream may have decrypted more than was read: then its socket is not readable.
                for channel in () if self._must_spin else self._all:
                    channel.check_peer_state()
                continue
            attempts += 1
            if self._must_spin and attempts <= SPINS:
                transfer.is_waiting = True
                try:
                    self._lock.release()
                    os.sched_yield()
                finally:
                    self._lock.acquire()  # another thread may have moved our messages meanwhile
                transfer.is_waiting = False
                continue
            self._wait(transfer, attempts, deadline)

    def _wait(self, transfer: "_Transfer", attempts: int, deadline: Deadline) -> None:
        """Wait a little, and raise what ends the call."""
        transfer.check(self._members(transfer.tag))
        if time.monotonic() >= transfer.announces_at:
            transfer.announce()
        transfer.is_waiting = True
        self.on_wait()
        deadline.check()
        ready: Sequence[Channel] = self._all
        if self._must_spin:
            self._pause(attempts - SPINS)
        elif attempts % SILENCE_CHECK_ATTEMPTS:
            ready = self._poll(deadline)
        transfer.is_waiting = False
        if self._is_closed:
            raise ChannelClosed(self.rank, is_own=True)
        for channel in ready:
            channel.check_peer_state()
        self._tell_followers()

    def _move_some(self) -> bool:
        """Move what can be moved; return False if nothing can."""
        has_moved = False
        for channel in self._all:
            if channel.error is not None or channel.has_left:
                continue
            if channel.is_sending and channel.send_some():
                has_moved = True
            # A peer whose own sending is blocked may first have to be read from.
            if (channel.posted_count or channel.is_sending) and channel.read_some():
                has_moved = True
        if has_moved:
            self._tell_followers()
        return has_moved

    def _withdraw(self, transfer: "_Transfer") -> None:
        """Keep no reference to the caller's memory."""
        for channel, receive in transfer.receives:
            channel.cancel(receive)
        for channel, end in transfer.send_ends.items():
            if channel.sent_bytes < end:
                channel.copy_unsent()

    def _break(self) -> None:
        """Close all streams without a goodbye: to the other ranks, this one is dead.

        A signal's exception, such as KeyboardInterrupt, may have come between the moving of bytes
        and their counting. Another message would then arrive as a part of the interrupted one.
        """
        for channel in self._all:
            channel.error = ChannelClosed(channel.peer)
            channel.stream.close()

    def _tell_followers(self) -> None:
        if self._followers:
            self._moved.notify_all()

    def _pause(self, attempt: int) -> None:
        """Sleep, for twice as long as the last time, up to the longest pause."""
        pause = min(FIRST_PAUSE_SECONDS * 2 ** min(attempt - 1, 10), LONGEST_PAUSE_SECONDS)
        try:
            self._lock.release()  # inside, or a signal's exception could leave it released
            time.sleep(pause)
        finally:
            self._lock.acquire()

    def _poll(self, deadline: Deadline) -> Sequence[Channel]:
        """Wait until channels are ready, and return them, or until another thread has moved."""
        seconds = min(deadline.left_seconds, ON_WAIT_SECONDS)
        if self._is_polled:
            self._followers += 1
            self._moved.wait(seconds)
            self._followers -= 1
            return ()
        poll = select.poll()
        if self._wake is not None:
            poll.register(self._wake, select.POLLIN)
        for channel in self._all:
            if channel.error is None and not channel.has_left:
                poll.register(channel.stream.fileno(), _events(channel))
        self._is_polled = True
        try:
            self._lock.release()
            # Rounded up: in its last millisecond the wait would otherwise spin.
            ready = {descriptor for descriptor, _ in poll.poll(ceil(seconds * 1000))}
        finally:
            self._lock.acquire()
            self._is_polled = False
        if self._wake is not None and not self._wake.closed and self._wake.fileno() in ready:
            os.eventfd_read(self._wake.fileno())
        return [channel for channel in self._all if channel.stream.fileno() in ready]


def _leave_to_parent() -> None:
    for backend in list(_backends):
        backend.leave_to_parent()


_backends: Final[WeakSet[MessageBackend]] = WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)


class _Transfer:
    """What one call of `exchange` waits for."""

    def __init__(self, tag: Tag) -> None:
        self.tag = tag
        self.receives: list[tuple[Channel, PostedReceive]] = []
        self.send_ends: dict[Channel, int] = {}
        """What `sent_bytes` of each channel is once all that this call sends is sent."""
        self.announces_at = inf
        self.is_waiting = False
        """True while nothing is half moved."""

    def is_done(self) -> bool:
        for channel, end in self.send_ends.items():
            # A sealed record cannot be taken back, and nothing sends it after we return.
            if channel.sent_bytes < end or channel.stream.has_unsent:
                return False
        for _, receive in self.receives:
            if not receive.is_done:
                if receive.error is not None:
                    raise receive.error
                return False
        return True

    def check(self, members: Sequence[Channel]) -> None:
        """Raise what ends this call, once all that has arrived is received."""
        for channel in members:
            error = channel.failure() or channel.operation_error(self.tag)
            if error is not None:
                raise error
        needed = [channel for channel, receive in self.receives if not receive.is_done]
        needed += [
            channel
            for channel, end in self.send_ends.items()
            if channel.sent_bytes < end or channel.stream.has_unsent
        ]
        for channel in needed:
            if channel.has_left:
                raise ChannelClosed(channel.peer)

    def announce(self) -> None:
        """Tell the ranks whose messages are missing which call this is, once."""
        self.announces_at = inf
        if self.tag.sequence:
            for channel in {channel for channel, receive in self.receives if not receive.is_done}:
                channel.send_control(self.tag, Kind.CALL)

    def waited_for(self) -> str:
        if len(self.receives) == 1:
            return f"a message of rank {self.receives[0][0].peer}"
        if not self.receives and len(self.send_ends) == 1:
            return f"room for a message to rank {next(iter(self.send_ends)).peer}"
        return "the messages of an exchange"


def _events(channel: Channel) -> int:
    """Return the poll events of a channel."""
    events = HANG_UP
    if channel.is_sending:
        events |= select.POLLOUT
    if channel.is_sending or channel.posted_count or not channel.is_paused:
        events |= select.POLLIN
    return events


def _target_of(target: Target) -> Target:
    """Return memory that can be written as bytes, and an accumulator as it is."""
    return _bytes_of(target, for_writing=True) if type(target) is memoryview else target


def _bytes_of(data: Data, *, for_writing: bool = False) -> memoryview:
    """Return contiguous memory as bytes; raises `Unsupported`."""
    view = memoryview(data)
    if not view.c_contiguous or (for_writing and view.readonly):
        kind = "contiguous memory that can be written" if for_writing else "contiguous memory"
        raise Unsupported(f"a message needs {kind}: copy it first")
    return view.cast("B") if view.nbytes else view
