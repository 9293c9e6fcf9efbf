"""A rank's way to its agent, whichever agent that is now.

It begins as an inherited socket. Once the agent at its other end has died, the rank calls at the
job's own socket until another one answers. The descriptor's number stays what it was: a thread
that waits on it or is about to write never meets something else there.
"""

import os
import select
import socket
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
        self._channel = None if agent_fd is None else _channel(agent_fd)
        self._address = address

    @classmethod
    def of(cls, settings: RankSettings) -> Self:
        return cls(settings.agent_fd, settings.agent_socket)

    @property
    def is_broken(self) -> bool:
        """Whether there was an agent, and it is gone."""
        return self._channel is not None and bool(_poll(self._channel, 0, 0.0))

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
        if self._channel is not None:
            try:
                self._channel.send(payload, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return

    def await_room(self, seconds: float) -> bool:
        """Wait until a packet can be sent; return whether it can."""
        return self._channel is not None and _poll(self._channel, select.POLLOUT, seconds) == (
            select.POLLOUT
        )

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Return a packet and the descriptors that came along, or None if there is none."""
        if self._channel is None:
            return None
        try:
            content, descriptors, _, _ = socket.recv_fds(
                self._channel, PACKET_LIMIT_BYTES, DESCRIPTORS_LIMIT, socket.MSG_DONTWAIT
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
        if self._channel is None or self.is_broken:
            time.sleep(seconds)
        else:
            _poll(self._channel, select.POLLIN, seconds)

    def await_end(self, seconds: float) -> None:
        """Wait until the agent at the other end is gone, or the time has passed."""
        if self._channel is None or _poll(self._channel, 0, seconds) & select.POLLNVAL:
            time.sleep(seconds)

    def renew(self) -> bool:
        """Call the agent that has taken over; return whether it has answered."""
        if self._channel is None or self._address is None:
            return False
        place = present(self._address)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fresh:
            try:
                fresh.settimeout(CALL_SECONDS)
                with short_address(place) as address:
                    fresh.connect(address)
                # Whoever may write to the directory could have put another socket there.
                if neighbour_of(fresh).user_id != os.geteuid():
                    return False
            except OSError:
                return False
            fresh.settimeout(0)
            number = self._channel.fileno()
            if fresh.fileno() == number:  # somebody had closed what was there
                fresh.detach()
            else:
                os.dup2(fresh.fileno(), number, inheritable=False)
        self._address = place
        return True

    def close(self) -> None:
        """For tests: a process leaves its line open to its end."""
        if self._channel is not None:
            self._channel.close()


def _channel(agent_fd: int) -> socket.socket | None:
    """Return the channel, or None if a launcher between the agent and us has closed it."""
    try:
        channel = socket.socket(fileno=agent_fd)
    except OSError:
        return None
    if channel.family == socket.AF_UNIX:
        return channel
    channel.detach()  # something else has that number by now, and keeps it
    return None


def _poll(channel: socket.socket, events: int, seconds: float) -> int:
    """Return what is true of the channel, an end or an error in any case."""
    poll = select.poll()
    poll.register(channel, events)
    return sum(found for _, found in poll.poll(1000 * seconds))
