"""One connection between two ranks: frames over a non-blocking socket.

A frame is its length (8 bytes, little-endian), the generation of the group, its kind, and that many
bytes. A message is read directly into the receiver's memory; one that is not awaited is buffered.
"""

import contextlib
import select
import socket
import struct
from collections import deque
from enum import IntEnum
from itertools import islice
from threading import Lock
from typing import Final

from muster.collectives.errors import ChannelClosed, PeerRefused, SizeMismatch, TransportFailed

CHUNK_BYTES: Final = 1 << 20
"""At most this much moves in one direction at a time; 256 KB to 1 MB are equally fast."""

GOODBYE_SECONDS: Final = 0.2
"""If the peer reads nothing for this long, no goodbye is sent and it will see a death."""

_NOTHING: Final = memoryview(b"")
_HEADER: Final = struct.Struct("<QQB")
_BATCH: Final = 16  # buffers in one system call, far below what any kernel allows


class Kind(IntEnum):
    """The kind of a frame."""

    MESSAGE = 0
    BARRIER = 1  # the sender has reached the next barrier
    GOODBYE = 2  # the sender has finished; a connection that ends without it is a death


class Channel:
    """Moves data without waiting; the caller waits.

    One thread at a time writes (holding `writing`) and one reads (holding `reading`).
    """

    def __init__(
        self, connection: socket.socket, peer: int, *, generation: int, limit_bytes: int
    ) -> None:
        connection.setblocking(False)  # noqa: FBT003  the standard library's signature
        self.peer = peer
        self.reading = Lock()
        self.writing = Lock()
        self.barriers = 0
        self.left = False
        self._socket = connection
        self._generation = generation
        self._limit_bytes = limit_bytes
        self._unsent: deque[memoryview] = deque()
        self._kept: deque[memoryview] = deque()
        self._wanted: deque[memoryview] = deque()
        self._header = bytearray(_HEADER.size)
        self._header_filled = 0
        self._length: int | None = None  # of the message whose header has come
        self._target: memoryview | None = None  # where it is being put
        self._filled = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    # -- sending: `writing` is held

    @property
    def sending(self) -> bool:
        """True if data is left to send."""
        return bool(self._unsent)

    def put(self, kind: Kind, data: memoryview = _NOTHING) -> None:
        """Queue a frame; `data` is read while it is sent, until `keep_unsent`."""
        header = _HEADER.pack(data.nbytes, self._generation, kind)
        self._unsent.append(memoryview(header))
        if data.nbytes:
            self._unsent.append(data.cast("B"))

    def send_some(self) -> bool:
        """Send up to a chunk; return False if the kernel accepted nothing."""
        try:
            sent = self._socket.sendmsg(self._batch())
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._failed(error) from error
        self._drop(sent)
        return True

    def keep_unsent(self) -> None:
        """Copy what is not sent yet; its owner may modify it from now on."""
        self._unsent = deque(memoryview(bytes(view)) for view in self._unsent)

    def _batch(self) -> list[memoryview]:
        batch, room_bytes = [], CHUNK_BYTES
        for view in islice(self._unsent, _BATCH):
            batch.append(view[:room_bytes])
            room_bytes -= batch[-1].nbytes
            if room_bytes == 0:
                break
        return batch

    def _drop(self, count: int) -> None:
        while count and count >= self._unsent[0].nbytes:
            count -= self._unsent.popleft().nbytes
        if count:
            self._unsent[0] = self._unsent[0][count:]

    # -- receiving: `reading` is held

    @property
    def receiving(self) -> bool:
        """True if an awaited message has not arrived."""
        return bool(self._wanted)

    @property
    def full(self) -> bool:
        """True if the buffered messages have reached the limit."""
        return sum(message.nbytes for message in self._kept) >= self._limit_bytes

    def want(self, target: memoryview) -> None:
        """Set the memory for the next message; raises `SizeMismatch` if it does not fit."""
        self._wanted.append(target.cast("B"))
        self._deliver()

    def stop_wanting(self) -> None:
        """Stop writing to the targets; a message that has partly arrived is buffered."""
        if self._wanted and self._target is self._wanted[0]:
            kept = bytearray(self._target.nbytes)
            kept[: self._filled] = self._target[: self._filled]
            self._target = memoryview(kept)
        self._wanted.clear()

    def read_some(self) -> bool:
        """Read once, a header or up to a chunk; return False if nothing arrived.

        Raises `ChannelClosed` at the end, `PeerRefused` for an invalid frame, and `SizeMismatch`
        for a message that does not fit the target; that message stays.
        """
        if self._length is None:
            return self._read_header()
        if self._target is None:
            self._target = self._choose_target(self._length)
        part = self._target[self._filled : self._filled + CHUNK_BYTES]
        count = self._receive(part) if part.nbytes else 0
        self._filled += count
        if self._filled == self._length:
            self._complete(self._target)
            return True
        return count > 0

    def _read_header(self) -> bool:
        count = self._receive(memoryview(self._header)[self._header_filled :])
        self._header_filled += count
        if self._header_filled == _HEADER.size:
            self._header_filled = 0
            self._open_frame(*_HEADER.unpack(self._header))
        return count > 0

    def _open_frame(self, length: int, generation: int, kind: int) -> None:
        if generation != self._generation:
            raise self._refused(
                f"it sent a frame of generation {generation}, not {self._generation}"
            )
        if length > (self._limit_bytes if kind == Kind.MESSAGE else 0):
            raise self._refused(f"it sent a frame of kind {kind} with {length} bytes")
        match kind:
            case Kind.MESSAGE:
                self._length = length
            case Kind.BARRIER:
                self.barriers += 1
            case Kind.GOODBYE:
                self.left = True
            case _:
                raise self._refused(f"it sent a frame of unknown kind {kind}")

    def _choose_target(self, length: int) -> memoryview:
        if self._wanted and self._wanted[0].nbytes != length:
            raise SizeMismatch(self._wanted[0].nbytes, length)
        return self._wanted[0] if self._wanted else memoryview(bytearray(length))

    def _complete(self, target: memoryview) -> None:
        self._length, self._target, self._filled = None, None, 0
        if self._wanted and target is self._wanted[0]:
            self._wanted.popleft()
        else:
            self._kept.append(target)
            self._deliver()

    def _deliver(self) -> None:
        while self._wanted and self._kept:
            if self._kept[0].nbytes != self._wanted[0].nbytes:
                raise SizeMismatch(self._wanted[0].nbytes, self._kept[0].nbytes)
            self._wanted.popleft()[:] = self._kept.popleft()

    def _receive(self, part: memoryview) -> int:
        try:
            count = self._socket.recv_into(part)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._failed(error) from error
        if count == 0:
            raise ChannelClosed(self.peer)
        return count

    # -- the end

    def close(self) -> None:
        """Send a goodbye, unless a message is half sent, and close the socket."""
        with contextlib.suppress(ChannelClosed, TransportFailed):
            if not self._unsent:
                self._send_goodbye()
            self._discard_unread()
        self._socket.close()

    def _send_goodbye(self) -> None:
        """Wait a little if the kernel's buffer is full."""
        self.put(Kind.GOODBYE)
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._unsent and poll.poll(GOODBYE_SECONDS * 1000):
            self.send_some()

    def _discard_unread(self) -> None:
        """Read what is left: closing with unread data resets the connection and loses sent data."""
        scratch = memoryview(bytearray(CHUNK_BYTES))
        while self._receive(scratch):
            pass

    def _refused(self, reason: str) -> PeerRefused:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        return PeerRefused(
            f"rank {self.peer} broke the protocol: {reason}; use the same Muster version everywhere"
        )

    def _failed(self, error: OSError) -> ChannelClosed | TransportFailed:
        if isinstance(error, ConnectionError | TimeoutError):
            return ChannelClosed(self.peer)
        return TransportFailed(
            f"the connection to rank {self.peer} failed: {error}. Check the network"
        )
