"""Read what ranks send: over their channels, and from ranks that reconnect after a takeover."""

import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from muster.contracts.messages.agent import RankSaid
from muster.host.peers import name_senders, peer_of, short_socket_path
from muster.runtime.agent_sockets import number_of, sockets_beside
from muster.runtime.stderr_messages import print_stderr
from worker.ranks.rank import RankProcess

BACKLOG: Final = 4096
"""All ranks of a job may connect at once, before the agent accepts the first one."""

CONNECTIONS_LIMIT: Final = 64
"""Accepted in one turn of the loop."""

PACKETS_LIMIT: Final = 64
"""Read of one rank in one turn, so that no rank keeps the others waiting."""

DRAIN_LIMIT: Final = 1 << 16
"""Packets read at the end of a channel: more than a socket holds, so nothing stays unread."""

Accept = Callable[[socket.socket, int], bool]
Report = Callable[[RankSaid], bool]
"""Sends a message on; returns whether a coordinator has accepted us."""


class ChannelReader:
    """Reads the channels of ranks in the caller's selector."""

    def __init__(self, selector: selectors.BaseSelector, report: Report) -> None:
        self._selector = selector
        self._report = report
        self._ranks: set[RankProcess] = set()

    def add(self, rank: RankProcess) -> None:
        """Read this rank's channel from now on, if it has one."""
        self._ranks.add(rank)
        self._register(rank)

    def replace_channel(self, rank: RankProcess, channel: socket.socket) -> None:
        """Continue with another channel after reading the rest of the previous one."""
        self.drain(rank)
        self._unregister(rank)
        if rank.channel is not None:
            rank.channel.close()
        rank.channel = channel
        self._register(rank)

    def remove(self, rank: RankProcess) -> None:
        """Read the rest, and no more."""
        self.drain(rank)
        self._unregister(rank)
        self._ranks.discard(rank)

    def drain(self, rank: RankProcess) -> None:
        """Read all that has come."""
        self._read(rank, DRAIN_LIMIT)

    def _read(self, rank: RankProcess, packets: int = PACKETS_LIMIT) -> None:
        if rank not in self._ranks:
            return  # removed in the same turn of the loop
        messages, is_open = rank.read(packets)
        for message in messages:
            said = RankSaid(rank=rank.rank, attempt=rank.attempt, message=message)
            rank.note_window(message, is_sent=self._report(said))
        if not is_open:
            self._unregister(rank)

    def _register(self, rank: RankProcess) -> None:
        if rank.channel is not None:
            self._selector.register(rank.channel, selectors.EVENT_READ, lambda: self._read(rank))

    def _unregister(self, rank: RankProcess) -> None:
        # A channel that the program has closed would stay readable for ever.
        if rank.channel is not None:
            with suppress(KeyError, ValueError):  # not registered, or closed already
                self._selector.unregister(rank.channel)


class ReconnectListener:
    """The agent's socket in the job's directory, where ranks find it after a takeover.

    A rank does not have to identify itself: the kernel tells which process has connected.
    """

    def __init__(self, path: Path, selector: selectors.BaseSelector, accept: Accept) -> None:
        """Remove the sockets of earlier agents, and listen at `path`.

        `accept` gets a channel and the peer's pid, and returns whether it keeps the channel.
        """
        self._accept = accept
        self._is_listening = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        name_senders(self._socket)
        try:
            path.parent.mkdir(exist_ok=True)  # no parents: a deleted job stays deleted
            path.unlink(missing_ok=True)
            with short_socket_path(path) as address:
                self._socket.bind(address)
            path.chmod(0o600)
            self._socket.listen(BACKLOG)
        except OSError as error:  # a file system without sockets: only takeovers suffer
            print_stderr(f"cannot listen at {path}, ranks would not find another agent: {error}")
            self._socket.close()
        else:
            selector.register(self._socket, selectors.EVENT_READ, self.accept_waiting)
            self._is_listening = True
        for other in sockets_beside(path):
            if number_of(other) < number_of(path):
                with suppress(OSError):
                    other.unlink()

    def accept_waiting(self) -> bool:
        """Accept waiting connections; return whether none is left for the next turn."""
        if not self._is_listening:
            return True
        for _ in range(CONNECTIONS_LIMIT):
            try:
                channel, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return True
            channel.settimeout(0)
            peer = peer_of(channel)
            if not (peer.user_id == os.geteuid() and self._accept(channel, peer.pid)):
                channel.close()
        return False
