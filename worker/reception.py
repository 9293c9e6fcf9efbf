"""Where ranks find the agent that has taken over: a socket in the job's directory.

A rank does not say who it is: the kernel says which process called, and whose it is.
"""

import os
import select
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from muster.peers import neighbour_of, short_address
from muster.remarks import remark
from muster.sight import require_descriptors
from muster.succession import generation_of, sockets_beside

BACKLOG: Final = 4096
"""All ranks of a job may call at once, before the agent has time for the first."""

CALLS_LIMIT: Final = 64
"""Taken in one go; whoever calls without end keeps nobody else waiting."""

FOR_A_CALL: Final = 2
"""Descriptors: the channel, and one to look with at who calls. Who could not be looked at would be
taken for nobody."""

Receive = Callable[[socket.socket, int], bool]


class Reception:
    """Takes the calls of ranks, in the caller's selector."""

    def __init__(self, path: Path, selector: selectors.BaseSelector, receive: Receive) -> None:
        """Whoever listened at `path` before is heard no more.

        `receive` gets a channel and the pid behind it, and returns whether it keeps the channel.
        """
        self._selector = selector
        self._receive = receive
        self._is_listening = self._is_resting = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            path.parent.mkdir(exist_ok=True)  # never the job's own, which goes with the job
            path.unlink(missing_ok=True)
            with short_address(path) as address:
                self._socket.bind(address)
            path.chmod(0o600)
            self._socket.listen(BACKLOG)
        except OSError as error:  # not every file system has sockets; this agent does not need it
            remark(f"ranks would not find another agent at {path}: {error}")
            self._socket.close()
        else:
            self._listen()
        for other in sockets_beside(path):
            if generation_of(other) < generation_of(path):
                with suppress(OSError):  # gone by now, or none that an agent has made
                    other.unlink()

    def answer(self) -> bool:
        """Take the calls there are; return whether none is left for later.

        A call that cannot be taken now, for want of descriptors, stays where it is: nobody looks
        there before `listen_again`, as the socket would be readable all the time.
        """
        if not self._is_listening:
            return not self._is_resting
        for _ in range(CALLS_LIMIT):
            if not self._is_called():
                return True
            try:
                require_descriptors(FOR_A_CALL)
                channel, _ = self._socket.accept()
            except OSError:
                self._rest()
                return False
            self._introduce(channel)
        return False

    def listen_again(self) -> None:
        """Try once more to take what could not be taken."""
        if self._is_resting:
            self._listen()

    def _is_called(self) -> bool:
        poll = select.poll()  # it needs no descriptor of its own
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _introduce(self, channel: socket.socket) -> None:
        channel.settimeout(0)
        neighbour = neighbour_of(channel)
        is_ours = neighbour.user_id == os.geteuid()
        if not (is_ours and self._receive(channel, neighbour.pid)):
            channel.close()

    def _listen(self) -> None:
        self._selector.register(self._socket, selectors.EVENT_READ, self.answer)
        self._is_listening, self._is_resting = True, False

    def _rest(self) -> None:
        self._selector.unregister(self._socket)
        self._is_listening, self._is_resting = False, True
