"""The agent's children: started, listened to, contained, reaped, written down, reported.

The order at an end is what makes the product's promise: first everything the rank started is
gone, then the end is durable, then it is reported. A successor never meets its predecessor.
"""

import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from muster.containment import is_enclosed
from muster.contracts.agent import AdoptedRank
from muster.contracts.environ import (
    AGENT_SOCKET,
    ERROR_FILE,
    ORPHAN_TIMEOUT,
    ORPHAN_TIMEOUT_SECONDS,
)
from muster.contracts.layout import JobFiles
from muster.contracts.messages import AgentMessage, Pulse, StartRank
from muster.contracts.secrets import SecretUnavailable
from muster.processes import mark_of, stands_still
from muster.succession import is_succeeded, present
from worker.adopted import Held, adopted_life
from worker.child import Child
from worker.delays import Delays
from worker.ends import End, Ends
from worker.hearing import Hearing
from worker.logbook import LateLogbook, Logbook
from worker.orphans import reap_orphans
from worker.reception import Reception
from worker.secrets import NO_SECRETS, Secrets
from worker.starting import Starter

Report = Callable[[AgentMessage], None]


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
        secrets: Secrets = NO_SECRETS,
    ) -> None:
        """`orphan_timeout_seconds` is for the ranks: how long they go on without any agent.

        `generation` counts the agents of the job. `secrets` are for the ranks, too.
        """
        self._files = files
        self._selector = selector
        self._starter = starter
        self._report = report
        self._orphan_timeout_seconds = orphan_timeout_seconds
        self._socket = files.agent_socket(generation)
        self._living: dict[int, Child] = {}
        self._reception: Reception | None = None
        self._hearing = Hearing(selector, report)
        self._watched: dict[int, int] = {}
        """Of adopted ranks, a descriptor that becomes readable at the end."""
        self._delays = Delays()
        self._secrets = secrets
        self._ends = Ends(files, secrets.redaction)

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
            yield from child.introduction()
            yield from child.last_words()
        yield from self._ends.told()

    def start(self, order: StartRank) -> None:
        """Start an incarnation; an order for a rank that lives, or an old one, is ignored."""
        is_old = self._ends.has_passed(order.rank, order.incarnation)
        if order.rank in self._living or is_old or self.is_succeeded:
            return
        try:
            child = self._bring_up(order)
        except (OSError, SecretUnavailable) as error:
            end = End.of_unstarted(order, error)
            for said in end.said:
                self._report(said)
            self._tell(end)
            return
        self._ends.forget(order.rank)
        self._living[order.rank] = child
        self._hearing.admit(child)
        for message in child.introduction():
            self._report(message)

    def _bring_up(self, order: StartRank) -> Child:
        logbook = Logbook(*self._log_files(order.rank, order.incarnation))
        try:
            return Child.start(self._complete(order), logbook, self._starter)
        except (OSError, SecretUnavailable):
            logbook.close()
            raise

    def _complete(self, order: StartRank) -> StartRank:
        """Tell the rank where to find another agent, how long to look, and where to leave word.

        It gets its secrets last of all, and nobody else does.
        """
        ways = {
            AGENT_SOCKET: str(self._socket),
            ORPHAN_TIMEOUT: repr(self._orphan_timeout_seconds),
            ERROR_FILE: str(self._files.error_file(order.rank, order.incarnation)),
        }
        environment = {**self._secrets.variables(), **order.environment, **ways}
        return msgspec.structs.replace(order, environment=environment)

    def adopt(self, adopted: AdoptedRank) -> None:
        """Look after a process that an earlier agent has started.

        Of one whose end is on record nothing is left, and it is reported in the very words. One
        that is gone without is reported by the next `settle`, by its own account if it left any.
        Raises OSError if there is no descriptor to hold it with.
        """
        end = self._ends.recorded(adopted)
        if end is not None:
            self._tell(end)
            return
        life = adopted_life(adopted.process)
        self._living[adopted.rank] = child = Child(
            rank=adopted.rank,
            incarnation=adopted.incarnation,
            mark=adopted.mark,
            logbook=LateLogbook(*self._log_files(adopted.rank, adopted.incarnation)),
            life=life,
            channel=None,
        )
        self._hearing.admit(child)
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

    @property
    def newest_socket(self) -> Path:
        """Of the agent that has the highest number, this one's own if there is none newer."""
        return present(self._socket)

    def _receive(self, channel: socket.socket, pid: int) -> bool:
        """Take a channel to the rank whose process has called; return whether there is one."""
        mark = mark_of(pid)
        for child in self._living.values():
            if pid == child.pid or (mark == child.mark and is_enclosed(pid, mark)):
                self._hearing.reconnect(child, channel)
                return True
        return False

    def send(self, rank: int, incarnation: int, number: signal.Signals) -> None:
        """Signal one incarnation's group; one that was never started here is reported as ended."""
        child = self.find(rank, incarnation)
        if child is not None:
            child.signal_group(number)
        elif rank not in self._living and not self._ends.has_passed(rank, incarnation):
            # The order to start it was lost. Nobody may wait for the end of what never was.
            self._tell(End.of_none(rank, incarnation, number))

    def send_all(self, number: signal.Signals) -> None:
        for child in self._living.values():
            child.signal_group(number)

    def note_orphaned(self, by: str) -> None:
        """Say, now and later, that it was one of us who asked all of these to stop."""
        for child in self._living.values():
            self._report(child.note_orphaned(by))

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
        ended = [child for child in self._living.values() if child.has_exited()]
        # Whoever was killed is told of first: who has lost a peer by that exits with a code.
        for child in sorted(ended, key=lambda child: child.ending().signal is None):
            self._settle(child)
        reap_orphans(own={child.pid for child in self._living.values()})

    def _settle(self, child: Child) -> None:
        is_contained = child.contain()
        # Its last words may be a call that nobody has taken yet.
        is_heard = self._reception is None or self._reception.answer()
        # Asked last: whoever has just been received has taken a descriptor.
        if self._delays.holds(child.rank):
            return  # the next tick looks again: no signal tells of descriptors
        if not ((is_contained and is_heard) or self._delays.is_over(child.rank)):
            return  # what was killed sends SIGCHLD, as we are its reaper; calls wait for a tick
        self._hearing.dismiss(child)
        del self._living[child.rank]
        self._delays.forget(child.rank)
        self._stop_watching(child.rank)
        child.logbook.note(time.time())
        unheard, ending = self._ends.learn(child)
        for said in unheard:
            self._report(said)
        end = self._ends.record(child, ending)
        # Only now: an agent that dies before leaves a zombie to look at, and after it the record.
        child.let_go()
        self._tell(end)

    def _tell(self, end: End) -> None:
        """Report an end; whatever was said before it has been reported."""
        self._ends.remember(end)
        self._report(end.exited)

    def listen_again(self) -> None:
        """Give everybody the next share; to be called once in a tick."""
        if self._reception is not None:
            self._reception.listen_again()
        self._hearing.listen_again()

    def _log_files(self, rank: int, incarnation: int) -> tuple[Path, Path]:
        return self._files.log(rank, incarnation), self._files.times(rank, incarnation)
