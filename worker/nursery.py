"""The agent's children: started, listened to, contained, reaped, written down, reported.

The order at an end is what makes the product's promise: first everything the rank started is
gone, then the end is durable, then it is reported. A successor never meets its predecessor.
"""

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from muster.contracts.agent import AdoptedRank
from muster.contracts.environ import AGENT_SOCKET, ORPHAN_TIMEOUT, ORPHAN_TIMEOUT_SECONDS
from muster.contracts.exit_record import ExitRecord
from muster.contracts.job import Reason
from muster.contracts.layout import JobFiles
from muster.contracts.messages import (
    AgentMessage,
    Pulse,
    RankExited,
    RankSaid,
    RankSpawned,
    Refused,
    StartRank,
)
from muster.processes import descendants, identify, mark_of, send_signal, stands_still
from muster.succession import is_succeeded
from worker.adopted import Held, adopted_life
from worker.child import Child
from worker.exits import read_exit_record, write_exit_record
from worker.lives import Ending
from worker.logbook import Logbook
from worker.memory import OomKills
from worker.reception import Reception
from worker.starting import Starter

CONTAINMENT_SECONDS: Final = 2.0
"""A process that survives SIGKILL for this long hangs in the kernel; the rank's end is reported
all the same, so that nobody waits for ever."""

STRANGERS_PAUSE_SECONDS: Final = 0.01
"""What was killed needs a moment to be gone."""

CANNOT_START: Final = 126
"""Exit code of a rank that never became a process, as shells have it."""

KILLED_WITHIN: Final = 128 + signal.SIGKILL
"""Exit code of a shell whose program was killed."""

Report = Callable[[AgentMessage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Obituary:
    """The last incarnation of a rank that has ended: its last words, and how."""

    said: tuple[RankSaid, ...]
    exited: RankExited


class Nursery:
    """All processes of one job on this host. `report` gets every piece of news."""

    def __init__(
        self,
        files: JobFiles,
        selector: selectors.BaseSelector,
        starter: Starter,
        report: Report,
        orphan_timeout_seconds: float = ORPHAN_TIMEOUT_SECONDS,
        generation: int = 0,
    ) -> None:
        """`orphan_timeout_seconds` is for the ranks: how long they go on without any agent.

        `generation` counts the agents of the job.
        """
        self._files = files
        self._selector = selector
        self._starter = starter
        self._report = report
        self._orphan_timeout_seconds = orphan_timeout_seconds
        self._socket = files.agent_socket(generation)
        self._living: dict[int, Child] = {}
        self._reception: Reception | None = None
        self._watched: dict[int, int] = {}
        """Of adopted ranks, a descriptor that becomes readable at the end."""
        self._exit_seen_at: dict[int, float] = {}
        self._ended: dict[int, _Obituary] = {}
        self._oom_kills = OomKills()
        files.exits.mkdir(parents=True, exist_ok=True)

    def __bool__(self) -> bool:
        return bool(self._living)

    @property
    def living(self) -> list[Child]:
        """The processes that have not been reaped."""
        return list(self._living.values())

    def find(self, rank: int, incarnation: int) -> Child | None:
        """Return the process that is this incarnation, if it lives."""
        child = self._living.get(rank)
        return child if child is not None and child.incarnation == incarnation else None

    def present_state(self) -> Iterator[AgentMessage]:
        """Everything a coordinator that knows nothing has to be told."""
        for child in self._living.values():
            yield from _introduction(child)
            yield from _standing(child)
        for obituary in self._ended.values():
            yield from obituary.said
            yield obituary.exited

    def start(self, order: StartRank) -> None:
        """Start an incarnation; an order for a rank that lives, or an old one, is ignored."""
        is_new = self._is_new_incarnation(order.rank, order.incarnation)
        if order.rank in self._living or not is_new or self.is_succeeded:
            return
        try:
            child = self._bring_up(order)
        except OSError as error:
            self._never_started(order, error)
            return
        self._ended.pop(order.rank, None)
        self._living[order.rank] = child
        self._start_listening(child)
        for message in _introduction(child):
            self._report(message)

    def _bring_up(self, order: StartRank) -> Child:
        logbook = self._logbook(order.rank, order.incarnation)
        try:
            return Child.start(self._with_ways(order), logbook, self._starter)
        except OSError:
            logbook.close()
            raise

    def _with_ways(self, order: StartRank) -> StartRank:
        """Tell the rank where to find another agent, and how long to look for one."""
        ways = {
            AGENT_SOCKET: str(self._socket),
            ORPHAN_TIMEOUT: repr(self._orphan_timeout_seconds),
        }
        return msgspec.structs.replace(order, environment={**order.environment, **ways})

    def adopt(self, adopted: AdoptedRank) -> None:
        """Look after a process that an earlier agent has started.

        Of one whose end is on record nothing is left, and it is reported in the very words. One
        that is gone without is reported by the next `settle`, as an end that nobody saw.
        """
        record = read_exit_record(self._files, adopted)
        if record is not None:
            self._note_end(record.exited, said=record.said)
            return
        life = adopted_life(adopted.process)
        self._living[adopted.rank] = Child(
            rank=adopted.rank,
            incarnation=adopted.incarnation,
            mark=adopted.mark,
            logbook=self._logbook(adopted.rank, adopted.incarnation),
            life=life,
            channel=None,
        )
        if isinstance(life, Held):
            # No signal tells of the end of a process that is not our child.
            self._watched[adopted.rank] = life.pidfd
            self._selector.register(
                life.pidfd, selectors.EVENT_READ, lambda: self._on_end_of(adopted.rank)
            )

    def _on_end_of(self, rank: int) -> None:
        self._stop_watching(rank)
        self.settle()

    def _stop_watching(self, rank: int) -> None:
        """An end stays readable for ever."""
        pidfd = self._watched.pop(rank, None)
        if pidfd is not None:
            self._selector.unregister(pidfd)

    def answer_calls(self) -> None:
        """Let ranks that have lost their agent find this one, from now on."""
        self._reception = Reception(self._socket, self._selector, self._receive)

    @property
    def is_succeeded(self) -> bool:
        """Whether another agent has taken over although this one lives: its machine stood still."""
        return is_succeeded(self._socket)

    def _receive(self, channel: socket.socket, pid: int) -> bool:
        """Take a channel to the rank whose process has called; return whether there is one."""
        mark = mark_of(pid)
        for child in self._living.values():
            if pid == child.pid or mark == child.mark:
                self._stop_listening(child)
                if child.channel is not None:
                    child.channel.close()
                child.channel = channel
                self._start_listening(child)
                return True
        return False

    def send(self, rank: int, incarnation: int, number: signal.Signals) -> None:
        """Signal one incarnation's group; one that was never started here is reported as ended."""
        child = self.find(rank, incarnation)
        if child is not None:
            child.signal_group(number)
        elif rank not in self._living and self._is_new_incarnation(rank, incarnation):
            # The order to start it was lost. Nobody may wait for the end of what never was.
            self._note_end(
                RankExited(
                    rank=rank,
                    incarnation=incarnation,
                    exit_code=None,
                    signal=number,
                    last_lines=(),
                )
            )

    def send_all(self, number: signal.Signals) -> None:
        for child in self._living.values():
            child.signal_group(number)

    def pulse(self) -> Pulse:
        """Return what to say of ranks that do not speak for themselves."""
        return Pulse(
            stopped=tuple(
                (child.rank, child.incarnation)
                for child in self._living.values()
                if not child.beats and stands_still(child.pid)
            )
        )

    def note_times(self) -> None:
        for child in self._living.values():
            child.logbook.note(time.time())

    def settle(self) -> None:
        """Bring every ended process to its end; to be called on SIGCHLD and now and then."""
        for child in list(self._living.values()):
            if child.has_exited():
                self._settle(child)
        self._reap_orphans()

    def end_strangers(self) -> None:
        """End whatever else is below this process, once no rank lives and nothing is kept warm.

        Who shed its mark (``env -i``) and its session is nobody's while ranks live; what is left
        at the end of the job is the job's.
        """
        deadline = time.monotonic() + CONTAINMENT_SECONDS
        while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in pids:
                record = identify(pid)
                if record is not None:
                    send_signal(record, signal.SIGKILL)
            self._reap_orphans()
            time.sleep(STRANGERS_PAUSE_SECONDS)

    def _settle(self, child: Child) -> None:
        first_seen = self._exit_seen_at.setdefault(child.rank, time.monotonic())
        if not child.contain() and time.monotonic() < first_seen + CONTAINMENT_SECONDS:
            return  # what was killed sends SIGCHLD when it is gone, as we are its reaper
        if self._reception is not None:
            self._reception.answer()  # its last words may be a call that nobody has taken yet
        self._hear(child)
        del self._living[child.rank], self._exit_seen_at[child.rank]
        self._stop_listening(child)
        self._stop_watching(child.rank)
        child.logbook.note(time.time())
        said, exited = tuple(_standing(child)), self._exit_of(child, child.ending())
        # Before it is reaped: an agent that dies here leaves the record or a zombie to look at.
        self._write_record(child, said, exited)
        child.let_go()
        self._note_end(exited, said)

    def _exit_of(self, child: Child, ending: Ending) -> RankExited:
        return RankExited(
            rank=child.rank,
            incarnation=child.incarnation,
            exit_code=ending.exit_code,
            signal=ending.signal,
            # Of one that ended well nobody asks, and thousands of them are told at once.
            last_lines=() if ending.exit_code == 0 else child.logbook.last_lines(),
            out_of_memory=_may_be_killed(ending) and self._oom_kills.claim(),
        )

    def _write_record(self, child: Child, said: tuple[RankSaid, ...], exited: RankExited) -> None:
        at = datetime.now(UTC).isoformat()
        record = ExitRecord(pid=child.pid, at=at, said=said, exited=exited)
        try:
            write_exit_record(self._files, record)
        except OSError as error:  # a full disk must not take the agent, and all ranks, with it
            print(f"the end of rank {child.rank} is not on record: {error}", file=sys.stderr)

    def _hear(self, child: Child) -> None:
        heard, is_open = child.listen()
        for message in heard:
            self._report(RankSaid(rank=child.rank, incarnation=child.incarnation, message=message))
        if not is_open:
            self._stop_listening(child)

    def _start_listening(self, child: Child) -> None:
        if child.channel is not None:
            self._selector.register(child.channel, selectors.EVENT_READ, lambda: self._hear(child))

    def _stop_listening(self, child: Child) -> None:
        """A closed channel would be readable for ever; closing it is a program's right."""
        if child.channel in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(child.channel)

    def _logbook(self, rank: int, incarnation: int) -> Logbook:
        return Logbook(self._files.log(rank, incarnation), self._files.times(rank, incarnation))

    def _never_started(self, order: StartRank, error: OSError) -> None:
        refused = Refused(
            reason=Reason.INVALID_PROGRAM,
            message=f"cannot be started in {order.working_dir}: {error}",
        )
        said = RankSaid(rank=order.rank, incarnation=order.incarnation, message=refused)
        self._report(said)
        exited = RankExited(
            rank=order.rank,
            incarnation=order.incarnation,
            exit_code=CANNOT_START,
            signal=None,
            last_lines=(),
        )
        self._note_end(exited, said=(said,))

    def _is_new_incarnation(self, rank: int, incarnation: int) -> bool:
        ended = self._ended.get(rank)
        return ended is None or incarnation > ended.exited.incarnation

    def _note_end(self, exited: RankExited, said: tuple[RankSaid, ...] = ()) -> None:
        self._ended[exited.rank] = _Obituary(said=said, exited=exited)
        self._report(exited)

    def _reap_orphans(self) -> None:
        """Reap what our ranks left to us. A rank's own zombie stays until it is settled."""
        own = {child.pid for child in self._living.values()}
        while True:
            try:
                zombie = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if zombie is None or zombie.si_pid in own:
                return
            os.waitpid(zombie.si_pid, os.WNOHANG)


def _may_be_killed(ending: Ending) -> bool:
    """Whether SIGKILL ended it, or the program that a shell or a container ran for it."""
    return ending.signal == signal.SIGKILL or ending.exit_code == KILLED_WITHIN


def _standing(child: Child) -> Iterator[RankSaid]:
    """Yield the last message of each kind, in the order in which they came."""
    for message in child.standing.values():
        yield RankSaid(rank=child.rank, incarnation=child.incarnation, message=message)


def _introduction(child: Child) -> Iterator[RankSpawned]:
    # A process that was over before it could be identified is named by its end instead.
    if child.identity is not None:
        yield RankSpawned(
            rank=child.rank,
            incarnation=child.incarnation,
            pid=child.pid,
            start_ticks=child.identity.start_ticks,
            boot_id=child.identity.boot_id,
            node=child.identity.node,
        )
