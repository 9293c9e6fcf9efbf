"""One incarnation of one rank, seen by its parent: start, listen, signal, contain, reap.

A rank leads a session of its own, so that a signal reaches its group; and it is enclosed
(`muster.containment`), so that what left the group is found too.
"""

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from muster.containment import end_incarnation
from muster.contracts.environ import MARK
from muster.contracts.errors import WireError
from muster.contracts.messages import (
    Beat,
    Layout,
    RankMessage,
    StartRank,
    decode_rank_message,
    encode,
)
from muster.processes import identify
from worker.logbook import Logbook
from worker.starting import Starter

MESSAGE_LIMIT_BYTES: Final = 1 << 16
"""A rank's messages are small; the socket keeps their boundaries and a longer one is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended; exactly one of the two is set."""

    exit_code: int | None
    signal: int | None


class Child:
    """A started process. The caller owns the order: listen, has_exited, contain, reap."""

    def __init__(self, order: StartRank, logbook: Logbook, starter: Starter) -> None:
        """Start it; raises OSError if there is no such directory, or no process to be had."""
        self.rank = order.rank
        self.incarnation = order.incarnation
        self.logbook = logbook
        self.standing: dict[type[RankMessage], RankMessage] = {}
        """The last message of each kind: what a new coordinator has to be told."""
        self._mark = order.environment[MARK]
        # Sequenced packets keep message boundaries and are sent whole or not at all, so two
        # threads of a rank may speak at once, and a full buffer costs a beat and not the training.
        self.channel, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        )
        try:
            self._started = starter.start(order, logbook.descriptor, theirs)
        except OSError:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.pid = self._started.pid
        self._is_reaped = False
        self.identity = identify(self.pid)

    def listen(self) -> tuple[list[RankMessage], bool]:
        """Return what the rank has said since the last call, and whether it can say more.

        What is no message is dropped: a program may write what it likes into its descriptors.
        """
        heard: list[RankMessage] = []
        is_open = True
        while True:
            try:
                packet = self.channel.recv(MESSAGE_LIMIT_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                is_open = False
                break
            with suppress(WireError):
                heard.append(decode_rank_message(packet))
        self.standing.update((type(message), message) for message in heard)
        return heard, is_open

    @cached_property
    def arena(self) -> int:
        """Shared memory of this incarnation alone: nobody has it before or after it."""
        return os.memfd_create(f"muster-arena-{self.rank}", os.MFD_CLOEXEC)

    def tell(self, layout: Layout, memory: Sequence[int]) -> bool:
        """Send a layout along with descriptors; return whether that is settled.

        A channel that is full is tried again; one that is closed has nobody behind it.
        """
        try:
            socket.send_fds(self.channel, [encode(layout)], memory)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and its group. A call after it was reaped does nothing."""
        if not self._is_reaped:
            # Not reaped yet, so neither the pid nor the group's number can mean another.
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return

    def has_exited(self) -> bool:
        """Return whether the process is over; its pid stays taken until it is reaped."""
        if self._is_reaped:
            return True
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None

    def contain(self) -> bool:
        """Kill whatever it started; return whether nothing of that is left."""
        self.signal_group(signal.SIGKILL)
        return end_incarnation(self._mark)

    def reap(self) -> Ending:
        """Take the exit status; only after `has_exited`, and only once nothing is left."""
        _, status = os.waitpid(self.pid, 0)
        self._is_reaped = True
        code = os.waitstatus_to_exitcode(status)
        if self._started.handle is not None:
            # Told, it does not wait itself for a pid that may be somebody else's by then.
            self._started.handle.returncode = code
        self.channel.close()
        if "arena" in vars(self):
            os.close(self.arena)
        return Ending(exit_code=code if code >= 0 else None, signal=-code if code < 0 else None)

    @property
    def was_stopping(self) -> bool:
        """Whether it had said that it was asked to stop."""
        beat = self.standing.get(Beat)
        return isinstance(beat, Beat) and beat.stopping
