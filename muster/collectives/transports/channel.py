"""The messages of one peer, of all groups and operations: frames over a stream of bytes.

A frame is a header of 48 bytes (little-endian: length of the payload, generation of the group,
context, sequence, call, kind) and its payload. Contexts and sequences share the stream: what is
awaited goes straight to its target, and what is not awaited yet is kept: MPI's posted receives and
unexpected messages.

The channel never waits and never raises: what goes wrong stands in `error`, in a `PostedReceive` or
in `aborts`, because one thread may move the messages of another.
"""

import select
import struct
from collections import defaultdict, deque
from enum import IntEnum
from typing import Final

from muster.collectives.backend import Tag, Target, fill
from muster.collectives.calls import mismatch
from muster.collectives.errors import (
    Aborted,
    ChannelClosed,
    CollectiveError,
    PeerRefused,
    SizeMismatch,
)
from muster.collectives.transports.streams import CHUNK_BYTES, Stream

GOODBYE_SECONDS: Final = 0.2
"""If the peer reads nothing for this long, no goodbye is sent and it will see a death."""

REASON_BYTES: Final = 1024
"""The longest reason of an abort."""

HEADER: Final = struct.Struct("<QQQQQB7x")
_PADDING: Final = memoryview(bytes(64))
_NOTHING: Final = memoryview(b"")


class Kind(IntEnum):
    """The kind of a frame."""

    MESSAGE = 0
    GOODBYE = 1  # the sender has finished; a connection that ends without it is a death
    ABORT = 2  # the sender left the operation of this context and sequence
    CALL = 3  # the sender waits for a message of this call


class PostedReceive:
    """A message that a caller waits for, and where it goes."""

    __slots__ = ("error", "is_done", "key", "tag", "target")

    def __init__(self, tag: Tag, target: Target) -> None:
        self.tag = tag
        self.key = tag[:2]
        self.target = target
        self.is_done = False
        self.error: CollectiveError | None = None


class Discard:
    """Takes the rest of a message that no operation needs any more."""

    def __init__(self, size_bytes: int) -> None:
        self.nbytes = size_bytes

    def put(self, offset: int, data: memoryview) -> None:
        """Do nothing."""


class Channel:
    """Moves messages to and from one peer. The caller holds the backend's lock."""

    def __init__(self, stream: Stream, *, generation: int, limit_bytes: int) -> None:
        self.stream = stream
        self.peer = stream.peer
        self.has_left = False
        """True once the peer has said goodbye."""
        self.error: CollectiveError | None = None
        self.aborts: dict[tuple[int, int], Aborted] = {}
        self._calls: dict[tuple[int, int], int] = {}
        """What the peer said that it called."""
        self.queued_bytes = 0
        self.sent_bytes = 0
        self._generation = generation
        self._limit_bytes = limit_bytes
        self._unsent: deque[memoryview] = deque()
        self._posted: defaultdict[tuple[int, int], deque[PostedReceive]] = defaultdict(deque)
        self.posted_count = 0
        """How many messages of this peer are awaited."""
        self._unexpected: defaultdict[tuple[int, int], deque[tuple[int, memoryview]]]
        self._unexpected = defaultdict(deque)
        self._current: dict[int, tuple[int, int]] = {}
        """Sequence and call of the current operation of each context; messages of earlier ones are
        dropped."""
        self._header = memoryview(bytearray(HEADER.size))
        self._frame: _Frame | None = None  # whose header has come
        self._filled = 0  # bytes of the header or of the payload

    # -- sending

    @property
    def is_sending(self) -> bool:
        """True if data is left to send."""
        return bool(self._unsent) or self.stream.has_unsent

    def put(self, tag: Tag, data: memoryview, kind: Kind = Kind.MESSAGE) -> int:
        """Queue a frame; return what `sent_bytes` will be once it is sent.

        `data` is read while it is sent, until `copy_unsent`.
        """
        context, sequence, call, _ = tag
        size = data.nbytes
        header = HEADER.pack(size, self._generation, context, sequence, call, kind)
        self._unsent.append(memoryview(header))
        self.queued_bytes += HEADER.size
        if size:
            # No copy: `exchange` returns once `sent_bytes` has passed it, or copies what is left.
            self._unsent.append(data)
            padding = -size % self.stream.alignment
            if padding:
                self._unsent.append(_PADDING[:padding])
            self.queued_bytes += size + padding
        return self.queued_bytes

    def send_some(self) -> bool:
        """Send up to a chunk; return False if the stream accepted nothing."""
        try:
            sent = self.stream.send(self._unsent)
        except CollectiveError as error:
            self.error = error
            return True
        self.sent_bytes += sent
        self._drop(sent)
        return sent > 0

    def send_control(self, tag: Tag, kind: Kind, text: memoryview = _NOTHING) -> None:
        """Send a short frame, at once if there is room, unless the peer is gone."""
        if self.error is None and not self.has_left:
            self.put(tag, text, kind)
            while self.error is None and self.is_sending and self.send_some():
                pass

    def copy_unsent(self) -> None:
        """Copy what is not sent yet; its owner may modify it from now on."""
        # Also what other calls have queued: they wait for a count of bytes, which stays right.
        self._unsent = deque(memoryview(bytes(view)) for view in self._unsent)

    def _drop(self, count: int) -> None:
        unsent = self._unsent
        while count and count >= unsent[0].nbytes:
            count -= unsent.popleft().nbytes
        if count:
            unsent[0] = unsent[0][count:]

    # -- receiving

    @property
    def is_paused(self) -> bool:
        """True if the next message is not awaited by any caller; it stays in the stream."""
        frame = self._frame
        return frame is not None and frame.target is None and not self._posted.get(frame.key)

    def begin(self, tag: Tag) -> None:
        """Drop what has come of earlier operations of this context."""
        context, sequence, call, _ = tag
        if self._current.get(context) == (sequence, call):
            return
        self._current[context] = sequence, call
        is_awaited = any(self._is_over(key) for key in self._calls if key[0] == context)
        for arrived in (self._unexpected, self.aborts, self._calls):
            for key in [key for key in arrived if key[0] == context and self._is_over(key)]:
                del arrived[key]
        if self._frame is not None and self._is_over(self._frame.key):
            self._frame.target = Discard(self._frame.length)
        if is_awaited:
            self.send_control(tag, Kind.CALL)

    def operation_error(self, tag: Tag) -> CollectiveError | None:
        """Return what ends the operation of `tag`: an abort, or a call that differs."""
        key = tag[:2]
        if key in self.aborts:
            return self.aborts[key]
        arrived = [*self._calls.items()]
        arrived += [(key, messages[0][0]) for key, messages in self._unexpected.items() if messages]
        if self._frame is not None and self._frame.kind == Kind.MESSAGE:
            arrived.append((self._frame.key, self._frame.call))
        for (context, sequence), call in arrived:
            if context == tag.context and sequence == tag.sequence and call != tag.call:
                return mismatch(self.peer, tag.call, call)
            # Messages keep their order, so what is awaited here was never sent.
            if context == tag.context and sequence > tag.sequence > 0 and self._posted.get(key):
                return mismatch(self.peer, tag.call, call, is_later=True)
        return None

    def post_receive(self, tag: Tag, target: Target) -> PostedReceive:
        """Set the memory for the next message with this tag."""
        receive = PostedReceive(tag, target)
        self._posted[receive.key].append(receive)
        self.posted_count += 1
        self._deliver(receive.key)
        return receive

    def offers(self, tag: Tag) -> bool:
        """Return whether a message of this tag has begun to come; keep what is before it."""
        key = tag[:2]
        while not self._unexpected.get(key):
            if self._frame is not None and self._frame.key == key:
                return self._frame.kind == Kind.MESSAGE
            if self.error is not None or self.has_left or not self.read_some():
                return False
        return True

    def cancel(self, receive: PostedReceive) -> None:
        """Stop writing to its target; a message that has partly arrived is kept, or dropped."""
        if receive.is_done:
            return
        posted = self._posted[receive.key]
        posted.remove(receive)
        if not posted:
            del self._posted[receive.key]
        self.posted_count -= 1
        frame = self._frame
        if frame is not None and frame.receive is receive:
            # From here on the rest arrives in our memory; the caller may reuse its own.
            frame.receive = None
            frame.target = self._replacement(frame)

    def read_some(self) -> bool:
        """Read a header, and up to a chunk of what follows; return False if nothing has arrived."""
        try:
            has_read = self._frame is None and self._read_header()
            frame = self._frame
            if frame is None or (has_read and frame.target is None):
                return has_read
            target = frame.target or self._choose_target(frame)
            return self._read_payload(frame, target) or has_read
        except CollectiveError as error:
            self.error = error
            return True

    def check_peer_state(self) -> None:
        """Check whether the peer is alive; a message that no caller awaits stays in the stream."""
        while self.error is None and not self.has_left:
            has_hung_up = self.stream.has_hung_up()
            if self.is_paused and not has_hung_up:
                return
            if not self.read_some():
                self._check_end(has_hung_up=has_hung_up)
                return

    def _check_end(self, *, has_hung_up: bool) -> None:
        try:
            self.has_left = self.stream.has_left()
        except CollectiveError as error:
            self.error = error
        # It was seen before nothing could be read, so no byte can follow.
        if has_hung_up and not self.has_left:
            self.error = ChannelClosed(self.peer)

    def _read_header(self) -> bool:
        left = HEADER.size - self._filled
        count = self.stream.receive(self._header, self._filled, left)
        self._filled += count
        if self._filled == HEADER.size:
            self._filled = 0
            self._open_frame(*HEADER.unpack(self._header))
        return count > 0

    def _open_frame(
        self, length: int, generation: int, context: int, sequence: int, call: int, kind: int
    ) -> None:
        if generation != self._generation:
            raise self._refused(
                f"it sent a frame of generation {generation}, not {self._generation}"
            )
        if length > self._longest_of(kind):
            raise self._refused(f"it sent a frame of kind {kind} with {length} bytes")
        if kind == Kind.GOODBYE:
            self.has_left = True
            return
        if kind == Kind.CALL:
            self._note_call(context, sequence, call)
            return
        self._frame = frame = _Frame((context, sequence), length, call, kind)
        if self._is_over(frame.key):
            frame.target = Discard(length)
        elif kind == Kind.ABORT:
            frame.target = memoryview(bytearray(length))
        elif self._posted.get(frame.key):
            self._choose_target(frame)
        if length == 0 and frame.target is not None:
            self._complete(frame)

    def _note_call(self, context: int, sequence: int, call: int) -> None:
        if self._is_over((context, sequence)):
            # It waits for what was sent before this answer, or was never sent.
            self.send_control(Tag(context, *self._current[context]), Kind.CALL)
        else:
            self._calls[context, sequence] = call

    def _longest_of(self, kind: int) -> int:
        """Return the most bytes that a frame of `kind` may have."""
        match kind:
            case Kind.MESSAGE:
                return self._limit_bytes
            case Kind.ABORT:
                return REASON_BYTES
            case Kind.GOODBYE | Kind.CALL:
                return 0
            case _:
                raise self._refused(f"it sent a frame of unknown kind {kind}")

    def _is_over(self, key: tuple[int, int]) -> bool:
        return 0 < key[1] < self._current.get(key[0], (0, 0))[0]

    def _choose_target(self, frame: "_Frame") -> Target:
        """Receive the message where its first caller wants it, or keep it if that does not fit."""
        posted, unexpected = self._posted.get(frame.key), self._unexpected.get(frame.key)
        receive = posted[0] if posted and not unexpected else None
        if receive is not None and self._fits(receive, frame.call, frame.length):
            # Straight into the caller's memory. It stays referenced until `cancel` or `_finish`.
            frame.receive, frame.target = receive, receive.target
        else:
            frame.target = memoryview(bytearray(frame.length))
        return frame.target

    def _fits(self, receive: PostedReceive, call: int, length: int) -> bool:
        if receive.tag.call != call:
            receive.error = mismatch(self.peer, receive.tag.call, call)
        elif receive.target.nbytes != length:
            receive.error = SizeMismatch(receive.target.nbytes, length, self.peer)
        return receive.error is None

    def _read_payload(self, frame: "_Frame", target: Target) -> bool:
        count = 0
        if self._filled < frame.length:
            count = self.stream.receive(target, self._filled, frame.length - self._filled)
            self._filled += count
        if self._filled < frame.length:
            return count > 0
        padding = frame.length + -frame.length % self.stream.alignment - self._filled
        if padding:  # it may come later than the last element
            count = self.stream.receive(Discard(padding), 0, padding)
            self._filled += count
            if count < padding:
                return count > 0
        self._complete(frame)
        return True

    def _complete(self, frame: "_Frame") -> None:
        self._frame, self._filled = None, 0
        if frame.receive is not None:
            self._finish(frame.receive)
        elif not isinstance(frame.target, memoryview):
            return
        elif frame.kind == Kind.ABORT:
            reason = bytes(frame.target).decode(errors="replace")
            self.aborts[frame.key] = Aborted(self.peer, reason)
        else:
            self._unexpected[frame.key].append((frame.call, frame.target))
            self._deliver(frame.key)

    def _deliver(self, key: tuple[int, int]) -> None:
        """Give unexpected messages to the receives that match them."""
        posted, unexpected = self._posted.get(key), self._unexpected[key]
        while posted and unexpected:
            call, data = unexpected[0]
            if not self._fits(posted[0], call, data.nbytes):
                break
            unexpected.popleft()
            fill(posted[0].target, 0, data)
            self._finish(posted[0])
        if not unexpected:
            del self._unexpected[key]

    def _finish(self, receive: PostedReceive) -> None:
        receive.is_done = True
        posted = self._posted[receive.key]
        posted.popleft()
        if not posted:
            del self._posted[receive.key]
        self.posted_count -= 1

    def _replacement(self, frame: "_Frame") -> Target:
        """Return where the rest of a message goes whose target is no longer ours."""
        if not isinstance(frame.target, memoryview):
            return Discard(frame.length)
        own = memoryview(bytearray(frame.length))
        own[: self._filled] = frame.target[: self._filled]
        return own

    # -- the end

    def failure(self) -> CollectiveError | None:
        """Return what is wrong with the peer; it broke the protocol once and is gone afterwards."""
        error = self.error
        if error is not None:
            self.error = ChannelClosed(self.peer)
        return error

    def close(self) -> None:
        """Send a goodbye, unless a message is half sent, and close the stream."""
        if self.error is None:
            try:
                if not self.is_sending and not self.has_left:
                    self._send_goodbye()
                self._discard_unread()
            except CollectiveError:
                pass  # the peer closed first
        self.stream.close()

    def _send_goodbye(self) -> None:
        """Wait a little if the kernel's buffer is full."""
        self.put(Tag(), memoryview(b""), Kind.GOODBYE)
        if (descriptor := self.stream.fileno()) < 0:
            self.send_some()
            return
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while self.is_sending and self.error is None and poll.poll(GOODBYE_SECONDS * 1000):
            self.send_some()

    def _discard_unread(self) -> None:
        """Read what is left: closing with unread data resets the connection and loses sent data."""
        scratch = Discard(CHUNK_BYTES)
        while self.stream.receive(scratch, 0, CHUNK_BYTES):
            pass

    def _refused(self, reason: str) -> PeerRefused:
        self.stream.close()
        return PeerRefused(
            f"rank {self.peer} broke the protocol: {reason}; use the same Muster version everywhere"
        )


class _Frame:
    """A message whose header has come."""

    __slots__ = ("call", "key", "kind", "length", "receive", "target")

    def __init__(self, key: tuple[int, int], length: int, call: int, kind: int) -> None:
        self.key = key
        self.length = length
        self.call = call
        self.kind = kind
        self.target: Target | None = None
        self.receive: PostedReceive | None = None
