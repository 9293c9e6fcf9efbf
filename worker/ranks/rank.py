"""One attempt of one rank, as its agent sees it: start, read, signal, contain, release.

A rank leads its own session, so that a signal reaches its group, and is contained
(`muster.host.containment`), so that processes that have left the group are found too.
"""

import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Final, Self

import msgspec

from muster.contracts.errors import WireError
from muster.contracts.interpreter import version_problem
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import RankSaid, RankSpawned, StartRank
from muster.contracts.messages.rank import (
    SAVED_LIMIT,
    SPARE_READY,
    Code,
    Executing,
    Heartbeat,
    Hello,
    JoinedGroup,
    JoinedProcessEnded,
    PermanentFailure,
    RankMessage,
    Ready,
    Saved,
    Warned,
    WorkerGroup,
)
from muster.contracts.messages.wire import decode_rank_hello, decode_rank_message, encode
from muster.contracts.rank import Phase
from muster.contracts.series import Window, joined
from muster.contracts.settings.environ import LATE_PULSES
from muster.contracts.settings.names import ATTEMPT_VARIABLES, PROCESS_TAG, SPARE_RANK
from muster.host.containment import is_contained, kill_attempt, tagged_processes
from muster.host.peers import name_senders, receive_from
from muster.host.processes import ProcessorWait, identify, running_in_group, send_signal
from worker.ranks.log_index import LogIndex
from worker.ranks.process import (
    UNKNOWN_EXIT,
    AdoptedProcess,
    ChildProcess,
    ExitStatus,
    ProcessHandle,
)
from worker.ranks.start import Starter

WARNINGS_LIMIT: Final = 100
"""Warnings of one attempt that become events of the job; its log holds all of them."""

HELLO_SECONDS: Final = 2.0
"""How long an adopted rank may take to find its next agent and repeat what it has said."""

MESSAGE_LIMIT_BYTES: Final = 1 << 17
"""Messages of ranks are small. The socket keeps their boundaries and cuts longer ones."""


READY_PACKETS: Final = 64  # most that a spare process sends before it is ready


@dataclass(eq=False, kw_only=True)
class RankProcess:
    """One attempt. Order at its end: has_exited, contain, exit_status, release."""

    rank: int
    attempt: int
    tag: str
    log: LogIndex | None  # None if it cannot be opened
    process: ProcessHandle
    channel: socket.socket | None  # None until a rank has reconnected

    def __post_init__(self) -> None:
        self._first_tag = self.tag
        self.trainer_pid = 0
        """Of the process that was the last to say hello; 0 before. Its forks have others."""
        self.trainers: dict[int, ProcessHandle] = {}
        """By pid: the processes that have said hello, oldest first."""
        self._asked: set[ProcessHandle] | None = None
        """Those that got SIGTERM since an end of the attempt was requested."""
        self._is_group_asked = False
        self._last_word = UNKNOWN_EXIT
        self._known_at = time.monotonic() + HELLO_SECONDS if self.channel is None else -math.inf
        """When an adopted rank has told who trains, and whether that stops already."""
        self._seen_at = time.monotonic()
        self._wait: ProcessorWait | None = None
        """Of its trainer, while that is late with its heartbeat."""
        self._survivors: ProcessorWait | None = None
        """The wait of what has not ended at once by SIGKILL."""
        self._latest: dict[type[RankMessage], RankMessage] = {}
        """The last message of each type, in order of arrival, for a new coordinator."""
        self._saved: deque[Saved] = deque(maxlen=SAVED_LIMIT)
        """All of them: each reports epochs that no later one may report."""
        self._window: Window | None = None
        """The values of heartbeats that no coordinator has received."""
        self._warnings = 0

    @classmethod
    def start(cls, order: StartRank, log: LogIndex, starter: Starter, *gpus: int) -> Self:
        """Start it; raises OSError if the directory is missing or there is no process."""
        # Sequenced packets are sent whole or not at all. So two threads of a rank can send at
        # once, and a full buffer costs a heartbeat instead of blocking training.
        channel, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        )
        name_senders(channel)
        try:
            pid = starter.start(order, log.descriptor, theirs, *gpus)
        except OSError:
            channel.close()
            raise
        finally:
            theirs.close()
        return cls(
            rank=order.rank,
            attempt=order.attempt,
            tag=order.environment[PROCESS_TAG],
            log=log,
            process=ChildProcess(pid),
            channel=channel,
        )

    def become(self, order: StartRank) -> bool:
        """Make a spare process the attempt of an order; return False if it has just ended."""
        own = {name: text for name, text in order.environment.items() if name in ATTEMPT_VARIABLES}
        if self.channel is None:
            return False
        try:
            self.channel.send(msgspec.msgpack.encode(own))
        except OSError:
            return False
        self.rank, self.attempt = order.rank, order.attempt
        self.tag = own[PROCESS_TAG]
        kept = (Executing, Code)
        self._latest = {kind: message for kind, message in self._latest.items() if kind in kept}
        return True

    @property
    def is_ready(self) -> bool:
        """Whether a spare process waits for its order."""
        self.read(READY_PACKETS)
        return Ready in self._latest

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self, packets: int) -> tuple[list[RankMessage], bool]:
        """Return the messages to report of at most so many packets, and whether more can come.

        Anything that is not a message is dropped: a program may write into any descriptor.
        """
        messages: list[RankMessage] = []
        if self.channel is None:
            return messages, True
        for _ in range(packets):
            try:
                packet, sender = receive_from(self.channel, MESSAGE_LIMIT_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet, sender = b"", 0
            if not packet:
                return messages, False
            self._seen_at, self._wait = time.monotonic(), None
            with suppress(WireError):
                message = self._decoded(packet, sender)
                if self.keep(message):
                    messages.append(message)
        return messages, True

    def _decoded(self, packet: bytes, sender: int) -> RankMessage:
        """Return a message, or a failure for the hello of another Muster; raises `WireError`."""
        # An adopted rank may be older than this agent: that of its own version has accepted it.
        if isinstance(self.process, ChildProcess):
            with suppress(WireError):  # no hello
                hello = decode_rank_hello(packet)
                python = hello.python or "the job's own"  # builds before 0.1.0 did not say
                if problem := version_problem(python, hello.version, hello.protocol):
                    return PermanentFailure(reason=Reason.INVALID_PROGRAM, message=problem)
        message = decode_rank_message(packet)
        if isinstance(message, Hello):
            self._latest.pop(JoinedProcessEnded, None)
            if sender:
                self._note_trainer(sender)
        if isinstance(message, Heartbeat) and sender not in {0, self.trainer_pid}:
            # Another process that has joined, and exits: the rank goes on.
            return msgspec.structs.replace(message, phase=Phase.TRAINING)
        return message

    def _note_trainer(self, pid: int) -> None:
        """Hold on to a process that has said hello: a wrapper may lie between it and us."""
        if pid != self.trainer_pid:  # what the one before it has said does not hold for this one
            self._latest.pop(Heartbeat, None)
        self.trainer_pid = pid
        if pid == self.pid:
            self.trainers[pid] = self.process
            return
        for gone in [trainer for trainer in self.trainers.values() if trainer.has_exited()]:
            if gone is not self.process and self._asked is None:
                self.trainers.pop(gone.pid).release()
        record = None if pid in self.trainers else identify(pid, or_zombie=True)
        if record is not None:  # else it has reconnected, or its parent has reaped it already
            with suppress(OSError):  # no descriptor left: its group is signalled as a command's
                self.trainers[pid] = AdoptedProcess(record)

    @property
    def trainer(self) -> ProcessHandle | None:
        """The process that was the last to say hello; None if that is unknown, or was gone."""
        return self.trainers.get(self.trainer_pid)

    @property
    def has_lost_trainer(self) -> bool:
        """Whether the process that said hello has ended without the rank's own: once for each."""
        trainer = self.trainer
        if not self.trainer_pid or trainer is self.process or JoinedProcessEnded in self._latest:
            return False
        return trainer is None or trainer.has_exited()

    @property
    def is_stopping(self) -> bool:
        """Whether its trainer has said that it was asked to stop."""
        beat = self._latest.get(Heartbeat)
        return isinstance(beat, Heartbeat) and beat.stopping

    def signal(self, number: signal.Signals) -> None:
        """Signal it; SIGTERM asks it to save and exit, once, and SIGKILL ends that at once."""
        if number == signal.SIGTERM:
            self._asked = self._asked or set()
            self.continue_end()
            return
        if number == signal.SIGKILL:
            self._asked = None
        self.process.signal_group(number)

    def continue_end(self) -> None:
        """Ask the processes that said hello to save and exit and, once they have ended, the group.

        Until then they may need the rest of it: worker processes, or a reader of what they print.
        """
        is_unknown = Heartbeat not in self._latest and time.monotonic() < self._known_at
        if self._asked is None or is_unknown:
            return
        for trainer in {*self.trainers.values()} - self._asked:
            self._asked.add(trainer)
            if trainer.identity is not None and not self.is_stopping:
                with suppress(PermissionError):  # it has changed its user
                    send_signal(trainer.identity, signal.SIGTERM)
        if not self._is_group_asked and self._have_trainers_ended:
            self._is_group_asked = True
            if self.is_stopping and self.trainer is not None:
                self._last_word = self.trainer.exit_status()
            self.process.signal_group(signal.SIGTERM)

    @property
    def _have_trainers_ended(self) -> bool:
        return all(trainer.has_exited() for trainer in self.trainers.values())

    @property
    def may_be_saving(self) -> bool:
        """Whether something of it was asked to save and exit and runs: then do not contain it.

        What has left its group, such as the daemon of a tracker, serves those alone.
        """
        if self._asked is None:
            return False
        # The number of a group whose leader is not our child may be reused after its end.
        group = (pid for pid in running_in_group(self.pid) if is_contained(pid, self.tag))
        return not self._have_trainers_ended or any(group)

    def starved_seconds(self, pulse_seconds: float) -> float:
        """Return for how long it got no processor since its heartbeat is late, or it was killed.

        0 for a rank that is on time: a check reads a file for each thread.
        """
        is_late = time.monotonic() >= self._seen_at + LATE_PULSES * pulse_seconds
        if is_late and self._wait is None and self.trainer and not self.trainer.has_exited():
            self._wait = ProcessorWait(self.trainer.pid)
        wait = self._survivors or self._wait
        return 0.0 if wait is None else wait.seconds

    def exit_status(self) -> ExitStatus:
        """Return how it ended, once it has: the end of a trainer that has saved on request counts.

        Its wrapper dies of the same SIGTERM.
        """
        return self.process.exit_status() if self._last_word == UNKNOWN_EXIT else self._last_word

    def keep(self, message: RankMessage) -> bool:
        """Keep a message for the next coordinator; return False if it is not to be reported."""
        if message == SPARE_READY and self.rank != SPARE_RANK:  # it had its order already
            return False
        if isinstance(message, Saved):
            self._saved.append(message)
            return True
        self._warnings += isinstance(message, Warned)
        if isinstance(message, Warned) and self._warnings > WARNINGS_LIMIT:
            return False
        if isinstance(message, Code) and isinstance(before := self._latest.get(Code), Code):
            message = Code(files={**before.files, **message.files})
        # Remove first: the order of arrival matters, or a rank would seem to be starting.
        self._latest.pop(type(message), None)
        self._latest[type(message)] = message
        return True

    def note_window(self, message: RankMessage, *, is_sent: bool) -> None:
        """Keep the values of a heartbeat, unless a coordinator has received them."""
        if isinstance(message, Heartbeat):
            if is_sent:
                self._window = None
            elif message.window is not None:
                self._window = joined(self._window, message.window)

    def say(self, message: RankMessage) -> RankSaid:
        """Keep and return a message on its behalf."""
        self.keep(message)
        return RankSaid(rank=self.rank, attempt=self.attempt, message=message)

    @cached_property
    def arena(self) -> int:
        """Shared memory of this attempt alone; raises OSError if there is none at the moment.

        After adoption it is another one: the next group round delivers it.
        """
        return os.memfd_create(f"muster-arena-{self.rank}", os.MFD_CLOEXEC)

    def send_group(self, group: WorkerGroup, memory: Sequence[int]) -> bool:
        """Send a worker group with descriptors; return False if it has to be tried again."""
        if self.channel is None:
            return False
        try:
            socket.send_fds(self.channel, [encode(group)], memory)
        except ConnectionError:  # closed: nothing reads it any more
            return True
        except OSError:
            return False
        return True

    def contain(self) -> bool:
        """Kill everything that it has started; return whether nothing of that is left."""
        self.process.signal_group(signal.SIGKILL)
        # What a spare process was starting as it changed its tag may still have the first one.
        is_over = all([kill_attempt(tag) for tag in {self.tag, self._first_tag}])  # noqa: C419  both
        if not is_over and self._survivors is None:
            left = tagged_processes(self.tag)
            self._survivors = ProcessorWait(*(process.pid for process in left))
        return is_over

    def release(self) -> None:
        """Reap the process and close everything; only after it has been contained."""
        for process in {self.process, *self.trainers.values()}:
            process.release()
        if self.log is not None:
            self.log.close()
        if self.channel is not None:
            self.channel.close()
        if "arena" in vars(self):
            os.close(self.arena)

    @property
    def has_group(self) -> bool:
        """Whether it has joined a worker group."""
        return JoinedGroup in self._latest

    @property
    def has_joined(self) -> bool:
        """Whether it sends heartbeats of its own."""
        has_said = Hello in self._latest or Heartbeat in self._latest
        return has_said and JoinedProcessEnded not in self._latest

    @property
    def is_member(self) -> bool:
        """Whether other ranks may train with it and wait for it."""
        return Ready in self._latest

    def state(self) -> Iterator[RankSpawned | RankSaid]:
        """Yield its identity, unless it exited before it could be identified, and what it said."""
        identity = self.process.identity
        if identity is not None:
            yield RankSpawned(rank=self.rank, attempt=self.attempt, **asdict(identity))
        yield from self.kept_messages()

    def kept_messages(self) -> Iterator[RankSaid]:
        """Yield the last message of each type in order of arrival, then all saves."""
        for message in (*self._latest.values(), *self._saved):
            if isinstance(message, Heartbeat):
                message = msgspec.structs.replace(message, window=self._window)  # noqa: PLW2901
            yield RankSaid(rank=self.rank, attempt=self.attempt, message=message)
