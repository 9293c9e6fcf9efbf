"""The agent: the parent of one job's ranks on one host, started as ``python -P -m worker.agent``.

It starts what it is told to start, sees at once when a process ends, writes that down, contains
what the process left behind, and reports. It decides nothing. Without a coordinator it keeps its
ranks running and waits; only after the orphan timeout it lets them save and exit. The ranks of an
agent that has died it adopts: they have noticed nothing but a broken socket.

One thread, one selector. Commands come over the uplink, news over each rank's socket, deaths by
SIGCHLD through a wake-up descriptor.
"""

import ctypes
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, assert_never

import msgspec

from muster.contracts.agent import AgentAssignment
from muster.contracts.endings import REPLACED_CODE
from muster.contracts.layout import JobFiles
from muster.contracts.messages import (
    AgentHello,
    AgentMessage,
    Announce,
    CoordinatorMessage,
    Dismiss,
    KillRank,
    StartRank,
    TerminateRank,
    Welcome,
)
from muster.descriptors import DescriptorLimits
from muster.remarks import remark
from muster.sight import FOR_A_LOOK, require_descriptors
from worker.assembly import Assembly
from worker.nursery import Nursery
from worker.orphans import end_strangers
from worker.secrets import Secrets
from worker.starting import Exec, Fork, Starter
from worker.strays import end_strays
from worker.uplink import Uplink
from worker.warden import Warden, is_at_work

LOOK_SECONDS: Final = 1.0
"""How often the address of today's coordinator is read while there is a connection."""

SEARCH_SECONDS: Final = 0.05
"""How often it is read while there is none: a successor that has published is called at once."""

TICK_SECONDS: Final = 0.25
"""How often log sizes are noted: the precision of a line's time. And how often each rank may say
what fits into its share."""

RECONNECT_SECONDS: Final = 0.5
WELCOME_SECONDS: Final = 5.0
"""A coordinator welcomes at once, even with its database away."""

FOR_SERVICE: Final = 3 + FOR_A_LOOK
"""Descriptors, once all are held: where ranks call, a coordinator, the warden; and those to look
with. An agent that lacks them would let its ranks exit at last, as if there were no coordinator."""

_PR_SET_CHILD_SUBREAPER: Final = 36


class Agent:
    """The loop between a coordinator and a nursery."""

    def __init__(self, assignment: AgentAssignment) -> None:
        self._assignment = assignment
        files = JobFiles(Path(assignment.job_root))
        self._selector = selectors.DefaultSelector()
        self._uplink = Uplink(Path(assignment.address_file), self._selector, self._hear_coordinator)
        limits = DescriptorLimits.raised()
        self._secrets = Secrets.of(assignment)
        self._starter: Starter = (
            Fork(assignment.job_uid, limits) if assignment.is_managed else Exec(limits)
        )
        self._nursery = Nursery(
            files,
            self._selector,
            self._starter,
            self._tell,
            assignment.orphan_timeout_seconds,
            assignment.generation,
            self._secrets,
        )
        self._assembly = Assembly(self._nursery)
        self._epoch = 0
        self._leaving = False
        self._exit_code = 0
        self._alone_since = self._next_attempt = self._next_tick = time.monotonic()
        self._next_look = self._next_pulse = self._alone_since
        self._wake_up = _wake_on_child_signal()
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._on_child_signal)
        self._take_over()
        is_needed = not (assignment.is_managed or self._leaving)
        self._warden = _warden_of(assignment) if is_needed else None

    def run(self) -> int:
        """Serve until dismissed, or alone for too long; return the exit code."""
        while self._nursery or not self._leaving:
            for key, _ in self._selector.select(self._patience()):
                handler: Callable[[], None] = key.data
                handler()
            self._keep_time(time.monotonic())
        self._starter.close()
        if self._warden is not None:
            self._warden.dismiss()
        end_strangers()
        self._uplink.drop()
        return self._exit_code

    def _take_over(self) -> None:
        """Adopt who is to live on, and end whatever else an earlier agent may have left."""
        if self._nursery.is_succeeded:
            # Started by a coordinator that had stood still: what runs here is another agent's.
            self._resign("nothing is touched")
            return
        adopted = self._assignment.adopted
        require_descriptors()  # else it would seem that there are no strays
        were_asked = not self._assignment.is_managed and is_at_work(self._assignment.job_uid)
        end_strays(self._assignment.job_uid, {rank.mark for rank in adopted})
        for rank in adopted:
            self._nursery.adopt(rank)
        if were_asked:
            timeout = self._assignment.orphan_timeout_seconds
            self._nursery.note_orphaned(f"its warden (no agent for {timeout:g} s)")
        require_descriptors(FOR_SERVICE)
        # After that: whoever's call is answered is held already, and its end will be seen.
        self._nursery.answer_calls()
        if not adopted:
            # Of no use where ranks run already: the next one to start may be hours away.
            with suppress(OSError):  # no process to be had now: the first start tries again
                self._starter.warm_up()

    def _patience(self) -> float:
        moments = [self._next_look]
        moments.append(self._next_pulse if self._uplink.is_welcome else self._next_attempt)
        if self._nursery:
            moments.append(self._next_tick)
        return max(0.0, min(moments) - time.monotonic())

    def _keep_time(self, now: float) -> None:
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._nursery.listen_again()
            self._nursery.note_times()
            self._nursery.settle()
            self._assembly.deliver()
            if self._nursery.is_succeeded and not self._leaving:
                self._resign("what is left here ends")
        if self._uplink.is_welcome:
            self._alone_since = now
            self._pulse(now)
            if self._knows_another(now, LOOK_SECONDS):
                self._uplink.drop()  # it has lost its office and does not know it
        else:
            self._be_alone(now)

    def _knows_another(self, now: float, interval_seconds: float) -> bool:
        """Return whether there is a coordinator that we have not called yet."""
        self._next_look = min(self._next_look, now + interval_seconds)
        if now < self._next_look:
            return False
        self._next_look = now + interval_seconds
        return self._uplink.is_superseded

    def _pulse(self, now: float) -> None:
        """Say that this process runs. Whoever was ready to be heard has been heard by now."""
        if now >= self._next_pulse:
            self._next_pulse = now + self._assignment.pulse_seconds
            self._uplink.send(self._nursery.pulse())

    def _resign(self, consequence: str) -> None:
        """End what is left here: whoever took over could not reach it, and has replaced it."""
        sign = f"{self._nursery.newest_socket.name} is there"
        self._leaving = True
        self._exit_code = REPLACED_CODE
        self._nursery.note_orphaned(f"its agent ({sign}, a newer one's)")
        self._uplink.drop()
        self._nursery.send_all(signal.SIGKILL)
        remark(f"another agent has taken over this job: {sign}, {consequence}")

    def _be_alone(self, now: float) -> None:
        if self._knows_another(now, SEARCH_SECONDS) or now >= self._next_attempt:
            # Whoever has not welcomed us by now is no coordinator, or a dead one.
            self._uplink.drop()
            self._connect()
            self._next_attempt = now + (
                WELCOME_SECONDS if self._uplink.is_open else RECONNECT_SECONDS
            )
        alone_seconds = now - self._alone_since
        timeout = self._assignment.orphan_timeout_seconds
        if alone_seconds >= timeout + self._assignment.stop_grace_seconds:
            self._nursery.send_all(signal.SIGKILL)
        elif alone_seconds >= timeout and not self._leaving:
            self._leaving = True
            self._nursery.note_orphaned(f"its agent (no coordinator for {timeout:g} s)")
            self._nursery.send_all(signal.SIGTERM)
            remark(f"no coordinator for {timeout:g} s: the ranks save and exit")

    def _connect(self) -> None:
        if not self._uplink.connect():
            return
        self._uplink.send(
            AgentHello(
                job_uid=self._assignment.job_uid,
                generation=self._assignment.generation,
                token=self._assignment.token,
            )
        )
        for message in self._nursery.present_state():
            self._tell(message)

    def _tell(self, message: AgentMessage) -> None:
        """Tell the coordinator of ranks; what they hold of secrets stays here."""
        self._uplink.send(self._secrets.redaction.of(message))

    def _hear_coordinator(self, message: CoordinatorMessage) -> None:
        if not (self._uplink.is_welcome or isinstance(message, Welcome)):
            self._uplink.drop()  # whoever orders before it was accepted is no coordinator
            return
        match message:
            case Welcome():
                self._greet(message.epoch)
            case StartRank():
                self._nursery.start(message)
            case TerminateRank():
                self._nursery.send(message.rank, message.incarnation, signal.SIGTERM)
            case KillRank():
                self._nursery.send(message.rank, message.incarnation, signal.SIGKILL)
            case Announce():
                self._assembly.announce(message)
            case Dismiss():
                self._leaving = True
                self._nursery.send_all(signal.SIGKILL)
            case _:
                assert_never(message)

    def _greet(self, epoch: int) -> None:
        """Accept a coordinator, unless it is a stranger's or a later one has been here."""
        if epoch < self._epoch or not self._uplink.peer_is_ours:
            self._uplink.drop()
        else:
            self._epoch = epoch
            self._uplink.is_welcome = True

    def _on_child_signal(self) -> None:
        self._wake_up.recv(4096)
        self._nursery.settle()


def _warden_of(assignment: AgentAssignment) -> Warden | None:
    try:
        return Warden(
            assignment.job_uid, assignment.orphan_timeout_seconds, assignment.stop_grace_seconds
        )
    except OSError as error:  # the ranks can do without; they would only outlive us all
        remark(f"no warden can be started: {error}")
        return None


def _become_subreaper() -> None:
    """What a rank leaves behind becomes our child, and not that of a process far away."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _wake_on_child_signal() -> socket.socket:
    """Return a socket that becomes readable at every SIGCHLD."""
    reading, writing = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    return reading


def main() -> int:
    """Read the assignment from standard input and serve it."""
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=AgentAssignment)
    os.chdir("/")
    _become_subreaper()
    try:
        agent = Agent(assignment)
    except OSError as error:  # the ranks live on, and call the next one
        remark(f"this agent cannot look after its job, and leaves it to another one: {error}")
        return 1
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
