"""A rank's way to its agent, whichever agent that is now.

It begins as an inherited socket. Once the agent at its other end has died, the rank calls at the
job's own socket until another one answers. The descriptor's number stays what it was: a thread
that waits on it or is about to write never meets something else there. Unless the program has
closed it, as daemons close everything: the number then may mean a socket of its own. So it is
touched only while it means ours, and else the line goes on under another number.
"""

import os
import select
import socket
import stat
import time
from pathlib import Path
from typing import Final, Self

from muster.contracts.environ import RankSettings
from muster.peers import neighbour_of, short_address
from muster.succession import is_succeeded, present

CALL_SECONDS: Final = 1.0
"""How long a call waits; an agent that takes no calls for this long is called again later."""

PACKET_LIMIT_BYTES: Final = 1 << 16
DESCRIPTORS_LIMIT: Final = 253
"""Most that the kernel hands over at once."""


class Line:
    """Packets to and from an agent; any thread may use it. With nobody there, nothing happens."""

    def __init__(self, agent_fd: int | None, address: Path | None = None) -> None:
        """Without an `address`, the line ends with the agent that has the other end now."""
        self._was_given = agent_fd is not None
        self._channel = None if agent_fd is None else _channel(agent_fd)
        self._identity = None if self._channel is None else _identity(self._channel)
        self._address = address

    @classmethod
    def of(cls, settings: RankSettings) -> Self:
        return cls(settings.agent_fd, settings.agent_socket)

    @property
    def is_broken(self) -> bool:
        """Whether there was an agent, and it is gone."""
        if self._channel is None:
            return False
        channel = self._own
        return channel is None or bool(_poll(channel, 0, 0.0))

    @property
    def _own(self) -> socket.socket | None:
        """The channel, while its number means it; what a program has put there is its own."""
        channel = self._channel
        return None if channel is None or _identity(channel) != self._identity else channel

    @property
    def is_closed(self) -> bool:
        """Whether the program, or a launcher before it, has closed what was given to us.

        A socket that somebody has put in its place is not told from ours.
        """
        channel = self._channel
        if channel is None:
            return self._was_given
        try:
            return not stat.S_ISSOCK(os.fstat(channel.fileno()).st_mode)
        except OSError:
            return True

    @property
    def is_succeeded(self) -> bool:
        """Whether another agent has taken over although ours lives.

        On one machine a new agent first ends the one before it, or the ranks it does not adopt.
        So ours was out of its reach, on a machine that stood still, and so were we.
        """
        if self._channel is None or self._address is None or self.is_broken:
            return False
        # Once more after that look: an agent whose successor is there has died before it.
        return is_succeeded(self._address) and not self.is_broken

    @property
    def can_be_renewed(self) -> bool:
        """Whether it is known where another agent would be."""
        return self._channel is not None and self._address is not None

    def send(self, payload: bytes) -> None:
        """Send a packet, whole or not at all; it is lost without an agent that has room for it."""
        channel = self._own
        if channel is not None:
            try:
                channel.send(payload, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return

    def await_room(self, seconds: float) -> bool:
        """Wait until a packet can be sent; return whether it can."""
        channel = self._own
        return channel is not None and _poll(channel, select.POLLOUT, seconds) == select.POLLOUT

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Return a packet and the descriptors that came along, or None if there is none."""
        channel = self._own
        if channel is None:
            return None
        try:
            content, descriptors, _, _ = socket.recv_fds(
                channel, PACKET_LIMIT_BYTES, DESCRIPTORS_LIMIT, socket.MSG_DONTWAIT
            )
        except ConnectionResetError:
            # The agent died before it had heard all of us. That is said once; what it had told us
            # comes next, and then its end.
            return self.receive()
        except OSError:
            return None
        return (content, descriptors) if content else None

    def await_packet(self, seconds: float) -> None:
        """Wait until there is something to receive, or the time has passed."""
        channel = self._own
        if channel is None or _poll(channel, 0, 0.0):
            time.sleep(seconds)
        else:
            _poll(channel, select.POLLIN, seconds)

    def await_end(self, seconds: float) -> None:
        """Wait until the agent at the other end is gone, or the time has passed."""
        channel = self._own
        if channel is None or _poll(channel, 0, seconds) & select.POLLNVAL:
            time.sleep(seconds)

    def renew(self) -> bool:
        """Call the agent that has taken over; return whether it has answered."""
        if self._channel is None or self._address is None:
            return False
        place = present(self._address)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fresh:
                fresh.settimeout(CALL_SECONDS)
                with short_address(place) as address:
                    fresh.connect(address)
                # Whoever may write to the directory could have put another socket there.
                if neighbour_of(fresh).user_id != os.geteuid():
                    return False
                fresh.settimeout(0)
                self._replace(self._channel, fresh)
        except OSError:  # nobody answers, or a program holds all descriptors that it may have
            return False
        self._address = place
        return True

    def _replace(self, channel: socket.socket, fresh: socket.socket) -> None:
        """Go on with `fresh`; a thread that looks meanwhile finds no line, and loses a packet."""
        is_own = self._own is not None
        self._identity = _identity(fresh)
        if is_own and _takes_the_place(fresh, channel):
            return
        self._channel = _unwaiting(fresh.detach())
        if is_own:
            channel.close()
        else:
            channel.detach()  # and not closed: that would close what the program has there

    def close(self) -> None:
        """For tests: a process leaves its line open to its end."""
        if self._own is not None:
            self._own.close()
        elif self._channel is not None:
            self._channel.detach()


def _channel(agent_fd: int) -> socket.socket | None:
    """Return the channel, or None if a launcher between the agent and us has closed it."""
    try:
        channel = socket.socket(fileno=agent_fd)
    except OSError:
        return None
    kind = (channel.family, channel.type)
    channel.detach()  # something else may have that number by now, and keeps it
    is_ours = kind == (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return _unwaiting(agent_fd) if is_ours else None


def _unwaiting(number: int) -> socket.socket:
    """Return the socket; by itself it would wait for as long as the program's default says."""
    channel = socket.socket(fileno=number)
    channel.settimeout(0)
    return channel


def _takes_the_place(fresh: socket.socket, channel: socket.socket) -> bool:
    """Put `fresh` under the number of `channel`; no number can be had that is over the limit."""
    try:
        os.dup2(fresh.fileno(), channel.fileno(), inheritable=False)
    except OSError:
        return False
    return True


def _identity(channel: socket.socket) -> tuple[int, int] | None:
    """Return what tells this socket from every other of the machine; None if it is closed."""
    try:
        found = os.fstat(channel.fileno())
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _poll(channel: socket.socket, events: int, seconds: float) -> int:
    """Return what is true of the channel, an end or an error in any case."""
    number = channel.fileno()
    if number < 0:  # let go of by another thread, a moment ago
        return select.POLLNVAL
    poll = select.poll()
    poll.register(number, events)
    return sum(found for _, found in poll.poll(1000 * seconds))
