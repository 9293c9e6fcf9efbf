"""One incarnation of one rank, seen by its agent: start, listen, signal, contain, end.

A rank leads a session of its own, so that a signal reaches its group; and it is enclosed
(`muster.containment`), so that what left the group is found too.
"""

import os
import signal
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Final, Self

from muster.containment import end_incarnation
from muster.contracts.encoding import decode_rank_message, encode
from muster.contracts.environ import MARK
from muster.contracts.errors import WireError
from muster.contracts.messages import (
    SAVED_LIMIT,
    Beat,
    Hello,
    Layout,
    Orphaned,
    RankMessage,
    RankSaid,
    RankSpawned,
    Saved,
    StartRank,
    Warned,
)
from muster.contracts.process import ProcessRecord
from muster.sight import require_descriptors
from worker.lives import ExitStatus, Life, OwnChild
from worker.logbook import Logbook, Notes
from worker.starting import Starter

WARNINGS_LIMIT: Final = 100
"""Most warnings of one incarnation that become events of its job; all of them are in its log."""

MESSAGE_LIMIT_BYTES: Final = 1 << 16
"""A rank's messages are small; the socket keeps their boundaries and a longer one is cut."""

PACKETS_LIMIT: Final = SAVED_LIMIT + 64
"""Heard of one rank in a tick of its agent. A rank of ours says so much at once only to an agent
that takes over; a program that floods its channel has no more, and keeps nobody waiting."""

PACKET_BYTES: Final = 1 << 12
"""More than most packets have. One with more counts as several: a share is 1.25 MiB at most, and
several times what a socket holds."""


class Child:
    """One incarnation. The caller owns the order: listen, has_exited, contain, ending, let_go."""

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        mark: str,
        logbook: Notes,
        life: Life,
        channel: socket.socket | None,
    ) -> None:
        """`channel` is None until a rank that lost its agent has called."""
        self.rank = rank
        self.incarnation = incarnation
        self.mark = mark
        self.logbook = logbook
        self.channel = channel
        self.standing: dict[type[RankMessage], RankMessage] = {}
        """The last message of each kind, in the order in which they came: what a new coordinator
        has to be told. In another order a rank that has gone on would seem to be where it began."""
        self._saved: deque[Saved] = deque(maxlen=SAVED_LIMIT)
        """Each tells of passes that no later one may tell of."""
        self.grant(PACKETS_LIMIT)
        self._warnings = 0
        self._life = life

    @classmethod
    def start(cls, order: StartRank, logbook: Logbook, starter: Starter) -> Self:
        """Start it; raises OSError if there is no such directory, or no process to be had."""
        # Sequenced packets keep message boundaries and are sent whole or not at all, so two
        # threads of a rank may speak at once, and a full buffer costs a beat and not the training.
        channel, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        )
        try:
            started = starter.start(order, logbook.descriptor, theirs)
        except OSError:
            channel.close()
            raise
        finally:
            theirs.close()
        return cls(
            rank=order.rank,
            incarnation=order.incarnation,
            mark=order.environment[MARK],
            logbook=logbook,
            life=OwnChild(started),
            channel=channel,
        )

    @property
    def pid(self) -> int:
        return self._life.pid

    @property
    def identity(self) -> ProcessRecord | None:
        return self._life.identity

    @property
    def has_had_its_share(self) -> bool:
        """Whether it is not heard until it is granted more."""
        return self._share_bytes <= 0

    def grant(self, packets: int = PACKETS_LIMIT) -> None:
        """Let it be heard for so many packets from now on, or fewer if they are large ones."""
        self._share_bytes = packets * PACKET_BYTES

    def listen(self) -> tuple[list[RankMessage], bool]:
        """Return what the rank has said since the last call, and whether it can say more.

        What is beyond its share waits in the socket. What is no message is dropped: a program may
        write what it likes into its descriptors.
        """
        heard: list[RankMessage] = []
        is_open = True
        while not self.has_had_its_share:
            try:
                if self.channel is None:
                    break
                packet = self.channel.recv(MESSAGE_LIMIT_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                is_open = False
                break
            self._share_bytes -= max(len(packet), PACKET_BYTES)
            with suppress(WireError):
                heard.append(decode_rank_message(packet))
        return [message for message in heard if self.take(message)], is_open

    def take(self, message: RankMessage) -> bool:
        """Remember what a new coordinator has to be told; return whether this one is told."""
        if isinstance(message, Saved):
            self._saved.append(message)
            return True
        self._warnings += isinstance(message, Warned)
        if isinstance(message, Warned) and self._warnings > WARNINGS_LIMIT:
            return False
        self.standing.pop(type(message), None)
        self.standing[type(message)] = message
        return True

    def note_orphaned(self, by: str) -> RankSaid:
        """Remember who asks it to stop for want of anybody to look after it; return the words."""
        orphaned = Orphaned(by=by)
        self.take(orphaned)
        return RankSaid(rank=self.rank, incarnation=self.incarnation, message=orphaned)

    @cached_property
    def arena(self) -> int:
        """Shared memory of this incarnation alone: nobody has it before or after it.

        An agent that adopts a process makes it another one: the old arena is only in the hands of
        those who shared it, and the new one is found in the next layout. Raises OSError if there
        is none to be had now; the next one who asks may get it.
        """
        return os.memfd_create(f"muster-arena-{self.rank}", os.MFD_CLOEXEC)

    def tell(self, layout: Layout, memory: Sequence[int]) -> bool:
        """Send a layout along with descriptors; return whether that is settled.

        A channel that is full or not there yet is tried again, and so is what the kernel has no
        room for; a channel that is closed has nobody behind it.
        """
        if self.channel is None:
            return False
        try:
            socket.send_fds(self.channel, [encode(layout)], memory)
        except ConnectionError:
            return True
        except OSError:
            return False
        return True

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and its group. A call after it has ended does nothing."""
        self._life.signal_group(number)

    def has_exited(self) -> bool:
        """Return whether the process is over."""
        return self._life.has_exited()

    def contain(self) -> bool:
        """Kill whatever it started; return whether it is known that nothing of that is left."""
        self.signal_group(signal.SIGKILL)
        try:
            require_descriptors()
            return end_incarnation(self.mark)
        except OSError:  # no descriptors to look with
            return False

    def ending(self) -> ExitStatus:
        """Return how it ended; only after `has_exited`, and before it is let go of."""
        return self._life.ending()

    def let_go(self) -> None:
        """Reap it and close what we had of it; only once nothing of it is left."""
        self._life.let_go()
        self.logbook.close()
        if self.channel is not None:
            self.channel.close()
        if "arena" in vars(self):
            os.close(self.arena)

    @property
    def beats(self) -> bool:
        """Whether it was heard to join: then it speaks for itself."""
        return Hello in self.standing or Beat in self.standing

    def introduction(self) -> Iterator[RankSpawned]:
        """Yield who it is; one that was over before it could be looked at is named by its end."""
        if self.identity is not None:
            yield RankSpawned(
                rank=self.rank,
                incarnation=self.incarnation,
                pid=self.pid,
                start_ticks=self.identity.start_ticks,
                boot_id=self.identity.boot_id,
                node=self.identity.node,
            )

    def last_words(self) -> Iterator[RankSaid]:
        """Yield the last message of each kind, in the order in which they came, then its saves."""
        for message in (*self.standing.values(), *self._saved):
            yield RankSaid(rank=self.rank, incarnation=self.incarnation, message=message)
