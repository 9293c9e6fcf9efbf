"""The stream of bytes between two ranks: the seam between frames and what carries them."""

import select
import socket
import struct
from collections.abc import Iterable
from itertools import islice
from typing import Final, Protocol

from muster.collectives.backend import ELEMENT_BYTES, Accumulator, Target
from muster.collectives.errors import ChannelClosed, CollectiveError, TransportFailed

CHUNK_BYTES: Final = 1 << 20
"""At most this much moves in one direction at a time; 256 KB to 1 MB are equally fast."""


BUFFERS_AT_ONCE: Final = 16
"""Far below what any kernel allows."""

HANG_UP: Final = getattr(select, "POLLRDHUP", 0)
"""Linux: the peer has closed its sending side; data it sent may still be unread."""


SILENT_MILLISECONDS: Final = 11_000
"""A host that acknowledges nothing for this long is gone; as keepalive counts where nothing is sent
(`rendezvous.KEEP_ALIVE`). TCP_USER_TIMEOUT would also end a connection to a rank that computes for
longer and meanwhile reads nothing."""

_TCP_INFO: Final = struct.Struct("=24xI28xI")
"""tcp_info of Linux: segments in flight, and milliseconds since the last acknowledgement."""


class Stream(Protocol):
    """Both directions of a connection to one peer. No call waits.

    A peer that is gone raises `ChannelClosed`, after all that it had sent was received.
    """

    peer: int
    alignment: int = 1
    """Frames begin at multiples of it, so that payloads in memory lie on whole elements."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the peer dies, or -1 if there is none."""
        return -1

    @property
    def has_unsent(self) -> bool:
        """True if the stream itself holds bytes that it has accepted and not sent."""
        return False

    def send(self, parts: Iterable[memoryview]) -> int:
        """Accept bytes from the beginning of `parts`; return how many."""

    def receive(self, target: Target, offset: int, size_bytes: int) -> int:
        """Put up to `size_bytes` that have arrived into `target` from `offset` on; return how many.

        An `Accumulator` gets whole elements.
        """

    def has_left(self) -> bool:
        """True if the peer closed without a goodbye frame, and everything it sent is received."""
        return False

    def has_hung_up(self) -> bool:
        """True if nothing more comes than what can be received now."""

    def close(self) -> None:
        """Release all resources. May be called twice."""

    def leave_to_parent(self) -> None:
        """Release, in a child of the process that uses the stream, what would hide its end."""
        return  # other streams show the end of a process in other ways


class SocketStream(Stream):
    """A connected stream socket, which it owns."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        connection.setblocking(False)  # noqa: FBT003  the standard library's signature
        self.peer = peer
        self.socket = connection
        self._scratch = bytearray()
        self._scratched = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, parts: Iterable[memoryview]) -> int:
        try:
            # SIGPIPE would end this rank with its peer, in a program that does not ignore it.
            return self.socket.sendmsg(beginning_of(parts, CHUNK_BYTES), (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise failure_of(self.peer, error) from error

    def receive(self, target: Target, offset: int, size_bytes: int) -> int:
        if isinstance(target, memoryview):
            return self.read_into(target[offset : offset + min(size_bytes, CHUNK_BYTES)])
        return self._accumulate(target, offset, size_bytes)

    def _accumulate(self, target: Accumulator, offset: int, size_bytes: int) -> int:
        """Read into scratch memory, and pass on whole elements; the rest of one stays there."""
        # Not before: a stream may never carry what is added as it comes.
        if not self._scratch:
            self._scratch = bytearray(CHUNK_BYTES)
        room = memoryview(self._scratch)
        begun = self._scratched
        self._scratched += self.read_into(room[begun : min(size_bytes, CHUNK_BYTES)])
        usable = self._scratched
        if usable < size_bytes:
            usable -= usable % ELEMENT_BYTES
        if usable:
            target.put(offset, room[:usable])
            rest = self._scratched - usable
            room[:rest] = room[usable : self._scratched]
            self._scratched = rest
        return usable

    def read_into(self, part: memoryview) -> int:
        """Fill the beginning of `part`; return how many bytes had arrived."""
        try:
            count = self.socket.recv_into(part)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise failure_of(self.peer, error) from error
        # The end of the stream, as `part` is never empty: for an empty one it would be 0, too.
        if count == 0:
            raise ChannelClosed(self.peer)
        return count

    def has_left(self) -> bool:
        if _is_silent(self.socket):
            raise ChannelClosed(self.peer)
        return False

    def has_hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self.socket, HANG_UP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.socket.close()

    def leave_to_parent(self) -> None:
        self.socket.close()


def beginning_of(parts: Iterable[memoryview], size_bytes: int) -> list[memoryview]:
    """Return up to `size_bytes`, in no more buffers than one system call takes."""
    beginning = []
    for part in islice(parts, BUFFERS_AT_ONCE):
        beginning.append(part[:size_bytes])
        size_bytes -= beginning[-1].nbytes
        if size_bytes == 0:
            break
    return beginning


def _is_silent(connection: socket.socket) -> bool:
    """True if what was sent is not acknowledged: a host that lost its power sends no reset."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # a Unix socket, or closed
        return False
    in_flight, milliseconds = _TCP_INFO.unpack(info)
    return bool(in_flight) and milliseconds >= SILENT_MILLISECONDS


def failure_of(peer: int, error: OSError) -> CollectiveError:
    """Return the error of a connection, by what the system reports."""
    if isinstance(error, ConnectionError | TimeoutError):
        return ChannelClosed(peer)
    return TransportFailed(f"the connection to rank {peer} failed: {error}. Check the network")
