"""A rank's connection to its agent: the socket, and what a new agent has to be sent again.

Training never waits for supervision. A message is sent whole or, if the socket is full, not at all;
the next heartbeat repeats the state. After a takeover, the new agent gets every message that still
holds, in its original order.
"""

import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Final, Self

from msgspec.structs import replace

from muster.contracts.interpreter import VERSION
from muster.contracts.messages.rank import SAVED_LIMIT, Code, Heartbeat, RankMessage, Saved
from muster.contracts.messages.wire import encode
from muster.contracts.settings.environ import RankSettings
from muster.contracts.settings.names import HAS_JOINED
from muster.host.code import LoadedCode
from muster.host.peers import connect_to_own
from muster.runtime.agent_sockets import is_replaced, newest_socket

CONNECT_SECONDS: Final = 1.0
"""Timeout of one attempt to reach a new agent; the heartbeat thread tries again."""

ROOM_SECONDS: Final = 1.0
"""How long a message that is not repeated by heartbeats waits for room in the socket."""

RETRY_SECONDS: Final = 0.05
"""Between two attempts to reach a new agent."""

PACKET_LIMIT_BYTES: Final = 1 << 16
FILES_PER_MESSAGE: Final = 128  # of code, with paths of up to 500 characters each

DESCRIPTORS_LIMIT: Final = 253
"""SCM_MAX_FD: the kernel passes no more descriptors in one message."""


class AgentSocket:
    """Packets to and from the agent; thread-safe. Without an agent, packets are dropped.

    It starts as an inherited socket. After the agent has died it reconnects to the job's newest
    agent socket under the *same descriptor number*, so a thread that waits or writes never touches
    anything else. If the program has closed the number, as daemons do, it may mean a file of the
    program's own: then it is left alone, and there is no agent any more.
    """

    def __init__(self, agent_fd: int | None, address: Path | None = None) -> None:
        """Without an `address` there is no reconnecting."""
        self._was_given = agent_fd is not None
        self._channel = None if agent_fd is None else _inherited(agent_fd)
        if self._was_given and self._channel is None and address and not os.environ.get(HAS_JOINED):
            # A parent in between has closed it, as `subprocess` does unless told otherwise.
            path = newest_socket(address)
            with suppress(OSError), connect_to_own(path, CONNECT_SECONDS) as fresh:
                self._channel = _nonblocking(fresh.detach())
        self._identity = None if self._channel is None else _identity(self._channel)
        self._address = address

    @classmethod
    def of(cls, settings: RankSettings) -> Self:
        return cls(settings.agent_fd, settings.agent_socket)

    @property
    def is_broken(self) -> bool:
        """Whether there was an agent and it is gone."""
        if self._channel is None:
            return False
        channel = self._own
        return channel is None or bool(_poll(channel, 0, 0.0))

    @property
    def is_closed(self) -> bool:
        """Whether the program, or a launcher before it, has closed the inherited descriptor."""
        return self._was_given and self._own is None

    @property
    def is_replaced(self) -> bool:
        """Whether a newer agent has started although ours lives.

        A new agent first kills its predecessor, or the ranks that it does not adopt. So ours was
        out of its reach, on a machine that was suspended, and so was this process.
        """
        if self._channel is None or self._address is None or self.is_broken:
            return False
        # Check again: an agent that has just died is an ordinary takeover.
        return is_replaced(self._address) and not self.is_broken

    def send(self, payload: bytes) -> bool:
        """Send a packet, whole or not at all; return whether it was sent."""
        channel = self._own
        if channel is None:
            return False
        try:
            channel.send(payload, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until a packet can be sent; return whether it can."""
        channel = self._own
        return channel is not None and _poll(channel, select.POLLOUT, seconds) == select.POLLOUT

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Return a packet and its descriptors, or None if there is none."""
        channel = self._own
        if channel is None:
            return None
        try:
            content, descriptors, _, _ = socket.recv_fds(
                channel, PACKET_LIMIT_BYTES, DESCRIPTORS_LIMIT, socket.MSG_DONTWAIT
            )
        except ConnectionResetError:
            # Reported once if the agent died with unread packets; ours to read come after it.
            return self.receive()
        except OSError:
            return None
        return (content, descriptors) if content else None

    def wait_for_packet(self, seconds: float) -> None:
        """Wait until there is something to receive, or the time has passed."""
        channel = self._own
        if channel is None or _poll(channel, 0, 0.0):
            time.sleep(seconds)
        else:
            _poll(channel, select.POLLIN, seconds)

    def wait_for_loss(self, seconds: float) -> None:
        """Wait until the agent is gone, or the time has passed."""
        channel = self._own
        if channel is None or _poll(channel, 0, seconds) & select.POLLNVAL:
            time.sleep(seconds)

    def reconnect(self) -> bool:
        """Connect to the newest agent; return whether it has accepted."""
        if self.is_closed or self._address is None:
            return False
        path = newest_socket(self._address)
        try:
            with connect_to_own(path, CONNECT_SECONDS) as fresh:
                fresh.settimeout(0)
                if (channel := self._own) is None:  # closed meanwhile
                    return False
                self._replace(channel, fresh)
        except OSError:
            return False
        self._address = path
        return True

    def close(self) -> None:
        """Close it, for tests: a real process keeps it open until its end."""
        if (channel := self._own) is not None:
            channel.close()
        elif self._channel is not None:
            self._channel.detach()

    @property
    def _own(self) -> socket.socket | None:
        """The channel, unless the program has put something else under its number."""
        channel = self._channel
        return None if channel is None or _identity(channel) != self._identity else channel

    def _replace(self, channel: socket.socket, fresh: socket.socket) -> None:
        """Continue with `fresh`; another thread finds no channel meanwhile and drops a packet."""
        self._identity = _identity(fresh)
        try:
            os.dup2(fresh.fileno(), channel.fileno(), inheritable=False)
        except OSError:  # the limit of this process is below that number, its agent's is higher
            self._channel = _nonblocking(fresh.detach())
            channel.close()


class AgentClient:
    """Sends messages to the agent; thread-safe.

    Sending takes no lock, because a signal handler or a fork may interrupt it.
    """

    def __init__(self, agent_socket: AgentSocket) -> None:
        self.socket: Final = agent_socket
        self._latest: dict[type[RankMessage], tuple[int, RankMessage]] = {}
        """The last message of each type, with its position among all messages."""
        self._code = LoadedCode()
        self.code: dict[str, str] = {"Muster": VERSION}
        """Our version, and digests by path of the user's code that this process has loaded."""
        self._positions = count()
        self._saved: deque[Saved] = deque(maxlen=SAVED_LIMIT)
        self._is_up_to_date = True
        """Whether the current agent has been sent everything from before it took over."""
        self._reconnecting = threading.Lock()

    def send(self, message: RankMessage) -> bool:
        """Send a message; the next agent gets it too if it still holds. Return if it was sent.

        A message that does not fit into a packet is not sent: a heartbeat is repeated without the
        values that it sums up.
        """
        packet = encode(message)
        if len(packet) > PACKET_LIMIT_BYTES:
            return False
        if isinstance(message, Saved):
            self._saved.append(message)
        else:
            # The values of a heartbeat are sent once.
            held = replace(message, window=None) if isinstance(message, Heartbeat) else message
            self._latest[type(message)] = (next(self._positions), held)
        return self.socket.send(packet)

    def send_waiting(self, message: RankMessage) -> None:
        """Send a message, after waiting a moment for room if there is none."""
        self.socket.wait_for_room(ROOM_SECONDS)
        self.send(message)

    def report_code(self) -> None:
        """Report the user's code that this process has loaded since the last report."""
        self.code |= (found := self._code.fresh())
        fresh = iter(found.items())
        while files := dict(islice(fresh, FILES_PER_MESSAGE)):
            self.send_waiting(Code(files=files))

    def state(self) -> tuple[RankMessage, ...]:
        """Return every message that still holds, as a new agent would receive them."""
        latest = sorted(self._latest.values(), key=lambda entry: entry[0])
        return (*(message for _, message in latest), *self._saved)

    @property
    def is_replaced(self) -> bool:
        """True if a newer agent has replaced ours, and another process this one."""
        with self._reconnecting:
            return self.socket.is_replaced

    def wait_for_loss(self, seconds: float) -> None:
        """Wait until the agent is gone, or the time has passed; a moment if it is gone already."""
        if self.socket.is_broken:
            time.sleep(RETRY_SECONDS)
        else:
            self.socket.wait_for_loss(seconds)

    def ensure_agent(self) -> bool:
        """Return whether an agent is connected, after trying to reach a new one if necessary."""
        with self._reconnecting:
            if self.socket.is_broken:
                if not self.socket.reconnect():
                    return False
                self._is_up_to_date = False
            if not self._is_up_to_date:
                self._is_up_to_date = self._send_state()
            return True

    def _send_state(self) -> bool:
        """Send everything that still holds; return whether there was room for all of it."""
        for kind in sorted(self._latest, key=lambda kind: self._latest[kind][0]):
            if not self.socket.wait_for_room(ROOM_SECONDS):
                return False
            # Look it up late: the training thread may have replaced it by now.
            _, message = self._latest[kind]
            self.socket.send(encode(message))
        for saved in list(self._saved):
            if not self.socket.wait_for_room(ROOM_SECONDS):
                return False
            self.socket.send(encode(saved))
        return True


def _inherited(agent_fd: int) -> socket.socket | None:
    """Return the inherited channel, or None if a launcher in between has closed it."""
    try:
        channel = socket.socket(fileno=agent_fd)
    except OSError:
        return None
    kind = (channel.family, channel.type)
    channel.detach()  # it may be another file by now, which must stay open
    is_ours = kind == (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return _nonblocking(agent_fd) if is_ours else None


def _nonblocking(descriptor: int) -> socket.socket:
    # Explicit, as the program may have called socket.setdefaulttimeout().
    channel = socket.socket(fileno=descriptor)
    channel.settimeout(0)
    return channel


def _identity(channel: socket.socket) -> tuple[int, int] | None:
    """Return device and inode, which no other open socket has; None if it is closed."""
    try:
        found = os.fstat(channel.fileno())
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _poll(channel: socket.socket, events: int, seconds: float) -> int:
    """Return the poll(2) events of the channel; hang-up and errors are always included."""
    descriptor = channel.fileno()
    if descriptor < 0:  # another thread has just detached it
        return select.POLLNVAL
    poll = select.poll()
    poll.register(descriptor, events)
    return sum(found for _, found in poll.poll(1000 * seconds))
