"""The ranks of one job on this host: started, read, contained, recorded, reported.

The order at an exit is what the product's promise rests on: first everything the rank has started
is gone, then the exit record is written, then the exit is reported. So two attempts of a rank never
run at the same time.
"""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from muster.contracts.job.secrets import SecretUnavailable
from muster.contracts.messages.agent import (
    AgentHeartbeat,
    AgentMessage,
    AnnounceGroup,
    RankDied,
    RankExited,
    RankSaid,
    StartRank,
)
from muster.contracts.messages.assignment import AdoptedRank, AgentAssignment
from muster.contracts.messages.rank import Code, JoinedProcessEnded, Orphaned, Warned
from muster.contracts.settings.names import (
    AGENT_SOCKET,
    ERROR_FILE,
    ORPHAN_TIMEOUT,
    SENDS_CHECKPOINTS,
    STORAGE_SOCKET,
)
from muster.contracts.settings.paths import JobFiles, LogName
from muster.host.containment import is_contained, tag_of
from muster.host.processes import is_stopped
from muster.host.trace import stamp
from muster.program import InvalidProgram
from muster.runtime.agent_sockets import is_replaced, newest_socket
from muster.runtime.stderr_messages import print_stderr
from worker.ranks.containment import reap_zombies
from worker.ranks.exits import ExitLog, RankExit
from worker.ranks.gpus import RankGpus
from worker.ranks.listener import ChannelReader, ReconnectListener
from worker.ranks.log_index import LOGS_FULL, TRUNCATED, LogIndex, discard_oldest_lines
from worker.ranks.process import AdoptedProcess, ProcessHandle
from worker.ranks.rank import RankProcess
from worker.ranks.spares import SpareRanks
from worker.ranks.start import OtherCode, RankSecrets, Starter, changed_script

CONTAINMENT_SECONDS: Final = 2.0
"""A process that survives SIGKILL for this long hangs in the kernel. The exit of its rank is then
reported all the same, or the job would wait for ever."""

LOGS_CHECK_SECONDS: Final = 5.0
"""How often the disk space of all logs is summed up."""

Report = Callable[[AgentMessage], bool]


class RankTable:
    """All ranks of one job on this host.

    `report` gets every message for the coordinator, and returns whether one has accepted us.
    """

    def __init__(
        self,
        assignment: AgentAssignment,
        selector: selectors.BaseSelector,
        starter: Starter,
        report: Report,
        secrets: RankSecrets,
    ) -> None:
        self._gpus = RankGpus(assignment)
        self._files = files = JobFiles(Path(assignment.job_root))
        self._selector = selector
        self._starter = starter
        self._report = report
        self._pulse_seconds = assignment.agent_heartbeat_seconds
        self._socket = self._files.agent_socket(assignment.agent_number)
        self._variables = {
            AGENT_SOCKET: str(self._socket),
            ORPHAN_TIMEOUT: repr(assignment.orphan_timeout_seconds),
            STORAGE_SOCKET: str(files.storage_socket) if assignment.has_storage else "",
            SENDS_CHECKPOINTS: str(int(assignment.sends_checkpoints)),
        }
        self._max_log_bytes = assignment.max_log_bytes
        self._next_logs_check = 0.0
        self._are_logs_full = False
        self._running: dict[int, RankProcess] = {}
        self._listener: ReconnectListener | None = None
        self._reader = ChannelReader(selector, self._on_said)
        self._exited_at: dict[int, float] = {}
        self._secrets = secrets
        self._exits = ExitLog(self._files, secrets.redaction)
        self._spares = SpareRanks(assignment, starter, self._exits.claim_oom_kill, self._warn)

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def running(self) -> list[RankProcess]:
        """The ranks whose exit has not been recorded."""
        return list(self._running.values())

    def find(self, rank: int, attempt: int) -> RankProcess | None:
        """Return this attempt's process if it runs."""
        found = self._running.get(rank)
        return found if found is not None and found.attempt == attempt else None

    def state(self) -> Iterator[AgentMessage]:
        """Yield everything that a new coordinator has to know."""
        for rank in self._running.values():
            yield from rank.state()
        yield from self._exits.messages()

    def start(self, order: StartRank) -> None:
        """Start an attempt; ignored if its rank still runs, or the attempt has ended."""
        has_ended = self._exits.has_ended(order.rank, order.attempt)
        if order.rank in self._running or has_ended or self.is_replaced:
            return
        try:
            with self._gpus.claimed(order, len(self._running)) as (uuids, descriptors):
                rank = self._start(order, uuids, descriptors)
        except (OSError, SecretUnavailable, InvalidProgram, OtherCode) as error:
            exited = RankExit.of_failed_start(order, error)
            for said in exited.said:
                self._report(said)
            self._report_exit(exited)
            return
        self._gpus.hand_over(rank.tag, rank.process.identity)
        self._exits.forget(order.rank)
        self._running[order.rank] = rank
        stamp("rank forked", rank=order.rank, of=rank.pid)
        self._reader.add(rank)
        for message in rank.state():  # a spare process has said something, or its code differs
            self._report(message)

    def _start(
        self, order: StartRank, uuids: Sequence[str], descriptors: Sequence[int]
    ) -> RankProcess:
        environment = {
            **self._secrets.variables(),
            **order.environment,
            **({"CUDA_VISIBLE_DEVICES": ",".join(uuids)} if uuids else {}),
            **self._variables,
            ERROR_FILE: str(self._files.error_file(order.rank, order.attempt)),
        }
        complete = msgspec.structs.replace(order, environment=environment)
        files = self._log_files(order.rank, order.attempt)
        if (spare := self._spares.take(complete, *files)) is not None:
            return spare
        changed = changed_script(order)  # a spare process has reported its own
        log = LogIndex(*files)
        try:
            rank = RankProcess.start(complete, log, self._starter, *descriptors)
        except (OSError, InvalidProgram):
            log.close()
            raise
        if changed:
            rank.keep(Code(files=changed))
        return rank

    def adopt(self, adopted: AdoptedRank) -> None:
        """Supervise a process that an earlier agent has started; raises OSError.

        An exit record is reported as it is. A process that is gone without one is handled by the
        next `settle`, with its own record if it has left one.
        """
        exited = self._exits.recorded(adopted)
        if exited is not None:
            self._report_exit(exited)
            return
        process = AdoptedProcess(adopted.process)
        try:
            log = LogIndex(*self._log_files(adopted.rank, adopted.attempt))
        except OSError as error:  # disk full: the rank itself is not affected
            print_stderr(f"rank {adopted.rank}: the times of its log lines are lost: {error}")
            log = None
        rank = RankProcess(
            rank=adopted.rank,
            attempt=adopted.attempt,
            tag=adopted.process_tag,
            log=log,
            process=process,
            channel=None,
        )
        self._running[adopted.rank] = rank
        self._reader.add(rank)
        self._watch(process)

    def _watch(self, process: ProcessHandle) -> None:
        """Settle at its exit: SIGCHLD does not report that of a process that is not our child."""

        def on_exit() -> None:
            self._unwatch(process)  # it stays readable
            self.settle()

        if process.pidfd is not None and process.pidfd not in self._selector.get_map():
            self._selector.register(process.pidfd, selectors.EVENT_READ, on_exit)

    def _unwatch(self, process: ProcessHandle) -> None:
        if process.pidfd is not None:
            with suppress(KeyError):  # it was read already
                self._selector.unregister(process.pidfd)

    def close(self) -> None:
        """End what is left at the end of the agent."""
        self._spares.end_all()

    def listen(self) -> None:
        """Accept ranks that have lost their agent, from now on."""
        self._listener = ReconnectListener(self._socket, self._selector, self._accept)

    @property
    def is_replaced(self) -> bool:
        """True if a newer agent has replaced this one, for example after a suspend."""
        return is_replaced(self._socket)

    @property
    def newest_socket(self) -> Path:
        """The socket of the newest agent, which may be this one."""
        return newest_socket(self._socket)

    def _accept(self, channel: socket.socket, pid: int) -> bool:
        """Take the channel if the process belongs to a rank; return whether it does."""
        tag = tag_of(pid)
        for rank in self._running.values():
            if pid == rank.pid or (tag == rank.tag and is_contained(pid, tag)):
                self._reader.replace_channel(rank, channel)
                return True
        return False

    def send_signal(self, rank: int, attempt: int, number: signal.Signals) -> None:
        """Signal one attempt's group; report an attempt that never started as ended."""
        found = self.find(rank, attempt)
        if found is not None:
            self._signal(found, number)
        elif rank not in self._running and not self._exits.has_ended(rank, attempt):
            # The order to start it was lost, and the coordinator waits for its exit.
            exited = RankExited(rank=rank, attempt=attempt, exit_code=None, signal=number)
            self._report_exit(RankExit(exited=exited))

    def signal_all(self, number: signal.Signals) -> None:
        for rank in self._running.values():
            self._signal(rank, number)

    def _signal(self, rank: RankProcess, number: signal.Signals) -> None:
        rank.signal(number)
        for trainer in rank.trainers.values() if number == signal.SIGTERM else ():
            self._watch(trainer)

    def mark_orphaned(self, by: str) -> None:
        """Report, now and to later coordinators, that all ranks were asked to stop."""
        for rank in self._running.values():
            self._report(rank.say(Orphaned(by=by)))

    def pulse(self, late_seconds: float, sent_at: float) -> AgentHeartbeat:
        """Return the agent's heartbeat, which is so late, with the ranks that cannot send one."""
        each, pulse_seconds = self._running.values(), self._pulse_seconds
        outside = (rank for rank in each if not rank.has_joined)
        waits = ((rank.rank, rank.attempt, rank.starved_seconds(pulse_seconds)) for rank in each)
        return AgentHeartbeat(
            stopped=tuple((rank.rank, rank.attempt) for rank in outside if is_stopped(rank.pid)),
            sent_at=sent_at,
            # A pulse that is a little late says nothing: it would add up.
            late_seconds=round(late_seconds, 1) if late_seconds > pulse_seconds / 2 else 0.0,
            starved=tuple(wait for wait in waits if wait[-1]),
        )

    def tick(self) -> None:
        """Index the logs, and look for exits that no signal reports."""
        self._index_logs()
        for rank in self._running.values():
            self._report_lost_trainer(rank)
        if time.monotonic() >= self._next_logs_check:
            self._next_logs_check = time.monotonic() + LOGS_CHECK_SECONDS
            self._limit_logs()
        self._gpus.renew([rank.tag for rank in self._running.values()])
        self.settle()

    def _report_lost_trainer(self, rank: RankProcess) -> None:
        if rank.has_lost_trainer:
            self._reader.drain(rank)  # its last words come first
            self._report(rank.say(JoinedProcessEnded()))

    def report_deaths(self) -> bool:
        """Report members that have died, before anything else; return whether there are new ones.

        Their peers wait for a group without them, which needs neither containment nor record.
        """
        unknown = [rank for rank in self._running.values() if rank.rank not in self._exited_at]
        new = [rank for rank in unknown if rank.process.has_exited()]
        died = [rank for rank in new if rank.is_member and rank.process.exit_status().is_failure]
        for rank in new:
            stamp("exit seen", rank=rank.rank, of=rank.pid)
            self._exited_at[rank.rank] = time.monotonic()
        for rank in died:
            self._reader.drain(rank)  # a group without it depends on whether its loop was over
            self._report(RankDied(rank=rank.rank, attempt=rank.attempt))
        return bool(died)

    def _on_said(self, said: RankSaid) -> bool:
        is_sent = self._report(said)
        if all(rank.has_group for rank in self._running.values()):
            self._spares.prepare()  # not while a new rank needs the processor
        return is_sent

    def _warn(self, sentence: str) -> None:
        for rank in self.running[:1]:
            self._report(rank.say(Warned(message=sentence)))

    def settle(self) -> None:
        """Contain, record and report every exit; to be called on SIGCHLD and at every tick."""
        for rank in self._running.values():
            rank.continue_end()
        self.report_deaths()
        exited = [rank for rank in self._running.values() if rank.rank in self._exited_at]
        # Killed ranks first: their peers may exit with a code because they have lost them.
        for rank in sorted(exited, key=lambda rank: rank.process.exit_status().signal is None):
            self._settle(rank)
        self._spares.settle()
        reap_zombies(own={rank.pid for rank in self._running.values()} | self._spares.pids)

    def _settle(self, rank: RankProcess) -> None:
        if rank.may_be_saving:
            self._exited_at[rank.rank] = time.monotonic()
            return
        is_contained = rank.contain()
        stamp("exit contained")
        # Its last messages may be on a connection that is still waiting.
        is_read = self._listener is None or self._listener.accept_waiting()
        limit_seconds = CONTAINMENT_SECONDS + rank.starved_seconds(self._pulse_seconds)
        is_late = time.monotonic() >= self._exited_at[rank.rank] + limit_seconds
        if not ((is_contained and is_read) or is_late):
            return  # the next SIGCHLD or tick tries again
        self._index_logs()
        self._report_lost_trainer(rank)
        self._reader.remove(rank)
        del self._running[rank.rank], self._exited_at[rank.rank]
        for process in (rank.process, *rank.trainers.values()):
            self._unwatch(process)
        unreported, status = self._exits.examine(rank)
        for said in unreported:
            self._report(said)
        recorded = self._exits.record(rank, status)
        stamp("exit recorded")
        if is_contained:  # otherwise what hangs in the kernel may still hold the memory
            self._gpus.release(rank.tag)
        # Reap after recording: if this agent dies in between, a zombie or the record is left.
        rank.release()
        self._report_exit(recorded)

    def _index_logs(self) -> None:
        """Note how far all logs have come, at one time: so it tells whose error came first."""
        now = time.time()
        for rank in self._running.values():
            if rank.log is not None and rank.log.note(now):
                self._report(rank.say(Warned(message=TRUNCATED)))

    def _limit_logs(self) -> None:
        running = {LogName(rank.rank, rank.attempt) for rank in self.running}
        with suppress(OSError):  # the directory is gone
            is_full = discard_oldest_lines(self._files.logs, self._max_log_bytes, running)
            if is_full and running and not self._are_logs_full:
                self._are_logs_full = True
                self._warn(LOGS_FULL)

    def _report_exit(self, exited: RankExit) -> None:
        self._exits.keep(exited)
        self._report(exited.exited)

    def _log_files(self, rank: int, attempt: int) -> tuple[Path, Path]:
        return self._files.log(rank, attempt), self._files.times(rank, attempt)


class GroupPublisher:
    """Sends each rank the newest worker group, with the shared memory of its members.

    The memory is anonymous (memfd), so only ranks that get a descriptor can see it. An arena
    belongs to one attempt and is never reused. The result, which all members write, is created anew
    for each group round: a rank of an older round that was suspended still writes into memory that
    nothing reads. In a group of several hosts each member gets its own arena first, for the sums
    that it holds, and then a result and the arenas of this host.
    """

    def __init__(self, ranks: RankTable, host: str) -> None:
        """`host` is the coordinator's name for this one."""
        self._ranks = ranks
        self._host = host
        self._order: AnnounceGroup | None = None
        self._result: int | None = None
        self._recipients: list[RankProcess] = []
        self._sent_on: dict[RankProcess, socket.socket | None] = {}
        """The channel on which a rank received it; a new channel may have lost it."""

    def publish(self, order: AnnounceGroup) -> None:
        """Send a group to all ranks; one that is not newer than the last is ignored."""
        if self._order is not None and order.group.round <= self._order.group.round:
            return
        if self._result is not None:
            os.close(self._result)
            self._result = None
        self._order = order
        self._recipients, self._sent_on = self._ranks.running, {}
        self.deliver()

    def deliver(self) -> None:
        """Send the group to every rank that has not received it on its current channel.

        To be called at every tick. A group with a member that has exited is dropped: the
        coordinator will send another one.
        """
        if self._order is None or not any(map(self._is_pending, self._recipients)):
            return
        placed = list(zip(self._order.group.members, self._order.attempts, strict=True))
        here = [(member.rank, attempt) for member, attempt in placed if member.host == self._host]
        found = [self._ranks.find(*attempt) for attempt in here]
        members = [member for member in found if member is not None]
        if len(members) < len(found):
            self._recipients = []
            return
        if self._result is None:
            self._result = os.memfd_create("muster-result", os.MFD_CLOEXEC)
        memory = [self._result, *(member.arena for member in members)]
        is_alone = len(here) == len(placed)
        self._recipients = [rank for rank in self._ranks.running if rank in self._recipients]
        for rank in self._recipients:
            own = [] if is_alone else [rank.arena]
            own = [*own, *memory] if rank in members else []  # only members get memory
            if self._is_pending(rank) and rank.send_group(self._order.group, own):
                self._sent_on[rank] = rank.channel

    def _is_pending(self, rank: RankProcess) -> bool:
        return rank not in self._sent_on or self._sent_on[rank] is not rank.channel
