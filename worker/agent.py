"""The agent: parent of one job's ranks on one host.

It is a fork of the coordinator's fork server, or ``python -P -m muster worker.agent``.

It starts ranks on request, sees at once when a process exits, records that, kills what the process
has left behind, and reports. It decides nothing. Without a coordinator it keeps its ranks running;
after the orphan timeout it lets them save and exit. It adopts the ranks of an agent that has died.

One thread, one selector: commands from the coordinator, messages on each rank's socket, exits as
SIGCHLD through a wake-up descriptor or as pidfds.
"""

import itertools
import math
import os
import platform
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, assert_never

import msgspec

from muster.contracts.job.retry import REPLACED_CODE
from muster.contracts.location import moved_fields
from muster.contracts.messages.agent import (
    AgentHello,
    AgentMessage,
    AnnounceGroup,
    CheckpointsListed,
    CoordinatorMessage,
    Dismiss,
    HeartbeatHeard,
    InjectFault,
    KillRank,
    ListCheckpoints,
    RankCheckpoints,
    StartRank,
    TerminateRank,
    Welcome,
)
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.settings.paths import JobFiles
from muster.host.files import rotate
from muster.host.limits import ShellLimits
from muster.host.processes import (
    adopt_orphans,
    boot_id,
    follow_parent,
    machine_id,
    send_signal,
    since_boot,
)
from muster.host.trace import stamp
from muster.runtime.stderr_messages import print_stderr
from worker.coordinator.link import CoordinatorLink
from worker.helpers import helper_process, helper_tag
from worker.ranks.containment import kill_descendants, kill_leftovers
from worker.ranks.ranks import GroupPublisher, RankTable
from worker.ranks.start import (
    ExecStarter,
    PreforkStarter,
    RankSecrets,
    Starter,
    start_on_this_host,
)

ADDRESS_CHECK_SECONDS: Final = 1.0
"""How often the coordinator's address is read while connected."""

ADDRESS_SEARCH_SECONDS: Final = 0.05
"""How often while not connected: a successor is called as soon as it has published its address."""

TICK_SECONDS: Final = 0.25
"""How often logs are indexed, which is the precision of a line's time, and shares are renewed."""

GROUP_SECONDS: Final = 0.005
"""How long the containment of a dead rank waits for the survivors' new group."""

WELCOME_SECONDS: Final = 5.0
"""How long a coordinator may take to accept us; it does not need its database for that."""


class Agent:
    """The loop between a coordinator and the ranks."""

    def __init__(
        self, assignment: AgentAssignment, prefork: tuple[int, socket.socket] | None = None
    ) -> None:
        """`prefork` is the pid of a prefork server that is warm already, and the channel to it."""
        self._assignment = assignment
        self._selector = selectors.DefaultSelector()
        self._link = CoordinatorLink(assignment, self._selector, self._on_message)
        self._files = files = JobFiles(Path(assignment.job_root))
        self._logs = files.agent_log, files.storage_log
        limits = ShellLimits.replaced()
        self._secrets = RankSecrets(assignment)
        self._helper = helper_process(assignment, files)
        self._secrets.redaction.add((assignment.store_keys or {}).values())
        self._starter: Starter = ExecStarter(limits, assignment.python)
        if assignment.is_managed:
            self._starter = PreforkStarter(
                assignment.job_uid, limits, assignment.python, self._pulse
            )
            if prefork is not None:
                self._starter.use(*prefork)
        self._ranks = RankTable(
            assignment, self._selector, self._starter, self._report, self._secrets
        )
        self._groups = GroupPublisher(self._ranks, assignment.host)
        self._epoch = 0
        self._hello_sent_at = 0.0
        self._is_leaving = self._is_dismissed = self._is_listing = False
        self._exit_code = 0
        self._is_told_to_leave = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        now = time.monotonic()
        self._leased_at = since_boot()
        """When the last heartbeat was sent that the coordinator has answered; for an agent on the
        coordinator's host, when the two were last connected. After a machine was suspended, a link
        looks open for longer than the lease lasts."""
        self._next_connect = self._next_tick = now
        self._next_address_check = self._next_pulse = now
        self._settle_at = math.inf
        self._wake_up = _wake_on_sigchld()
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._on_sigchld)
        self._take_over(prefork_pid=0 if prefork is None else prefork[0])

    def run(self) -> int:
        """Serve until dismissed, or without a coordinator for too long; return the exit code."""
        while self._ranks or not self._is_leaving:
            if self._is_told_to_leave and not self._is_leaving:
                self._leave()
            ready = self._selector.select(self._timeout())
            self._check_lease()  # first: the machine may have been suspended
            for key, _ in ready:
                handler: Callable[[], None] = key.data
                handler()
            self._on_time(time.monotonic())
        self._ranks.close()
        self._starter.close()
        has_finished = self._helper is not None and self._helper.stop()
        kill_descendants()
        self._link.close()
        # A coordinator that has taken over on this host keeps the logs of all hosts here.
        has_left = self._assignment.is_remote and not self._link.is_on_this_host
        are_logs_sent = has_finished and has_left
        if are_logs_sent and self._is_dismissed and not self._ranks.is_replaced:
            shutil.rmtree(self._files.root, ignore_errors=True)
        return self._exit_code

    def _take_over(self, prefork_pid: int) -> None:
        """Adopt the ranks that are to go on, and kill what else an earlier agent has left."""
        if self._ranks.is_replaced:
            # A coordinator that was suspended has started us: a newer agent owns the ranks.
            self._resign("no process was touched")
            return
        adopted = self._assignment.adopted
        spared = {*(rank.process_tag for rank in adopted), helper_tag(self._assignment)}
        if self._assignment.agent_number > 1 and not self._assignment.is_joined:
            kill_leftovers(self._assignment.job_uid, spared, {os.getpid(), prefork_pid})
        for rank in adopted:
            self._ranks.adopt(rank)
        # Listen only now: when a rank has reconnected, its exit must be seen.
        self._ranks.listen()
        self._keep_helper_running()
        stamp("agent adopts")
        if not adopted:
            # Not where ranks run already: the next start may be hours away.
            with suppress(OSError):  # no process at the moment: the first start tries again
                self._starter.warm_up()

    def _keep_helper_running(self) -> None:
        if self._helper is not None:
            self._helper.ensure_running()

    def _timeout(self) -> float:
        moments = [self._next_address_check]
        moments.append(self._next_pulse if self._link.is_welcome else self._next_connect)
        if self._ranks:
            moments += [self._next_tick, self._settle_at]
        return max(0.0, min(moments) - time.monotonic())

    def _on_time(self, now: float) -> None:
        if now >= self._settle_at:
            self._settle_at = math.inf
            self._ranks.settle()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._keep_helper_running()
            self._ranks.tick()
            for log in self._logs:
                rotate(log)
            self._groups.deliver()
            if self._ranks.is_replaced and not self._is_leaving:
                self._resign("its ranks here are killed")
        if not self._link.is_welcome:
            self._on_time_alone(now)
            return
        if now >= self._next_pulse:
            self._pulse()
        if self._has_new_coordinator(now, ADDRESS_CHECK_SECONDS):
            self._link.close()  # this one has lost its lease and does not know it

    def _pulse(self) -> None:
        now = time.monotonic()
        sent_at = since_boot() if self._assignment.is_remote else 0.0
        self._link.send(self._ranks.pulse(now - self._next_pulse, sent_at))
        self._next_pulse = now + self._assignment.agent_heartbeat_seconds

    def _on_time_alone(self, now: float) -> None:
        if self._has_new_coordinator(now, ADDRESS_SEARCH_SECONDS) or now >= self._next_connect:
            self._link.close()  # a coordinator that has not accepted us by now is dead
            self._connect()
            self._next_connect = now + WELCOME_SECONDS

    def _check_lease(self) -> None:
        if self._link.is_welcome and not self._assignment.is_remote:
            self._leased_at = since_boot()
        alone_seconds = since_boot() - self._leased_at
        timeout = self._assignment.orphan_timeout_seconds
        if alone_seconds >= timeout + self._assignment.stop_grace_seconds:
            self._ranks.signal_all(signal.SIGKILL)
        elif alone_seconds >= timeout and not self._is_leaving:
            self._is_leaving = True
            self._ranks.mark_orphaned(f"its agent (no coordinator for {timeout:g} s)")
            self._ranks.signal_all(signal.SIGTERM)
            print_stderr(f"no coordinator for {timeout:g} s: the ranks save and exit")

    def _has_new_coordinator(self, now: float, interval_seconds: float) -> bool:
        """Return, at most once per interval, whether another address has been published."""
        self._next_address_check = min(self._next_address_check, now + interval_seconds)
        if now < self._next_address_check:
            return False
        self._next_address_check = now + interval_seconds
        return self._link.has_new_address

    def _on_sigterm(self, _number: int, _frame: object) -> None:
        self._is_told_to_leave = True

    def _leave(self) -> None:
        """Let the ranks save and exit, and then exit: the machine is taken away."""
        self._is_leaving = True
        print_stderr("SIGTERM: the ranks save and exit, and this agent leaves the machine")
        self._ranks.signal_all(signal.SIGTERM)

    def _resign(self, consequence: str) -> None:
        """Kill the ranks here: a newer agent could not reach them and has replaced them."""
        newer = f"replaced by a newer agent (socket {self._ranks.newest_socket.name})"
        self._is_leaving = True
        self._exit_code = REPLACED_CODE
        self._ranks.mark_orphaned(f"its agent, which was {newer}")
        self._link.close()
        self._ranks.signal_all(signal.SIGKILL)
        print_stderr(f"{newer}; {consequence}")

    def _connect(self) -> None:
        if not self._link.connect():
            return
        self._hello_sent_at = since_boot()
        self._link.send(
            AgentHello(
                job_uid=self._assignment.job_uid,
                host=self._assignment.host,
                agent_number=self._assignment.agent_number,
                token=self._assignment.token,
                machine=machine_id(),
                boot_id=boot_id(),
                node=platform.node(),
                address=self._link.own_address,
                sends_checkpoints=self._assignment.sends_checkpoints,
            )
        )
        for message in self._ranks.state():
            self._report(message)

    def _report(self, message: AgentMessage) -> bool:
        self._link.send(self._secrets.redaction.redact(message))
        return self._link.is_welcome

    def _on_message(self, message: CoordinatorMessage) -> None:  # noqa: C901, PLR0912  one case for each
        stamp("order received", order=type(message).__name__)
        if not (self._link.is_welcome or isinstance(message, Welcome)):
            self._link.close()  # orders before a welcome do not come from a coordinator
            return
        match message:
            case Welcome():
                if message.epoch < self._epoch:  # a coordinator that has been replaced
                    self._link.close()
                else:
                    self._epoch = message.epoch
                    self._link.is_welcome = True
                    self._leased_at = self._hello_sent_at
            case HeartbeatHeard():
                self._leased_at = message.sent_at
            case ListCheckpoints():
                self._list_checkpoints(message)
            case StartRank():
                self._start(message)
            case TerminateRank():
                self._ranks.send_signal(message.rank, message.attempt, signal.SIGTERM)
            case KillRank():
                self._ranks.send_signal(message.rank, message.attempt, signal.SIGKILL)
            case InjectFault():
                self._inject(message)
            case AnnounceGroup():
                self._groups.publish(message)
                self._settle_at = 0.0
            case Dismiss():
                self._is_leaving = self._is_dismissed = True
                self._ranks.signal_all(signal.SIGKILL)
            case _:
                assert_never(message)

    def _inject(self, fault: InjectFault) -> None:
        number = signal.Signals(fault.signal)
        for found in itertools.starmap(self._ranks.find, fault.attempts):
            if found is not None and found.process.identity is not None:
                with suppress(PermissionError):  # it has changed its user
                    send_signal(found.process.identity, number)
        if fault.agent == self._assignment.agent_number:
            self._ranks.signal_all(number)
            os.kill(os.getpid(), number)

    def _start(self, order: StartRank) -> None:
        if not self._is_leaving:  # else the rank starts with the next agent
            self._ranks.start(start_on_this_host(order, self._assignment))

    def _list_checkpoints(self, order: ListCheckpoints) -> None:
        """Answer once a thread has looked: a disk or a store may be slow.

        No rank is started before the answer, so no other thread runs when this process forks.
        """
        if self._is_listing:
            return  # asked again by a new connection
        self._is_listing = True
        wake_up, theirs = socket.socketpair()
        answers: list[CheckpointsListed] = []
        address = self._files.storage_socket if self._assignment.has_storage else None
        moves = () if self._assignment.sends_checkpoints else self._assignment.moves
        order = moved_fields(order, ("location", "inherited"), moves)

        def read() -> None:
            with theirs:  # at its end `wake_up` becomes readable
                answers.append(_listed(order, self._assignment.job_uid, address))

        thread = threading.Thread(target=read, daemon=True)

        def report() -> None:
            thread.join()
            self._is_listing = False
            self._selector.unregister(wake_up)
            wake_up.close()
            for answer in answers:
                self._report(answer)

        self._selector.register(wake_up, selectors.EVENT_READ, report)
        thread.start()

    def _on_sigchld(self) -> None:
        self._wake_up.recv(4096)
        self._keep_helper_running()  # before zombies are reaped
        self._next_address_check = 0.0  # a new coordinator sends this signal, too
        is_group_due = self._link.is_welcome and self._ranks.report_deaths()
        self._settle_at = time.monotonic() + GROUP_SECONDS * is_group_due


def _listed(order: ListCheckpoints, job_uid: str, address: Path | None) -> CheckpointsListed:
    """Return what the places of all ranks hold, or why they cannot be listed."""
    found: dict[bool, tuple[RankCheckpoints, ...]] = {}
    problem = None
    try:
        # Imported here: only agents of gangs that restart need it.
        from muster.runtime.storage_client import list_gang  # noqa: PLC0415

        for is_inherited, place in (False, order.location), (True, order.inherited):
            if place is not None:
                listed = list_gang(address, place, order.ranks, job_uid, is_inherited=is_inherited)
                found[is_inherited] = tuple(listed)
    except Exception as error:  # noqa: BLE001  without an answer the gang would never start
        problem = str(error) or repr(error)
    return CheckpointsListed(
        attempt=order.attempt,
        own=found.get(False, ()),
        inherited=found.get(True, ()),
        problem=problem,
    )


def _wake_on_sigchld() -> socket.socket:
    """Return a socket that becomes readable at every SIGCHLD."""
    reading, writing = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    return reading


def main(prefork: tuple[int, socket.socket] | None = None) -> int:
    """Read the assignment from standard input and serve it."""
    try:
        assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=AgentAssignment)
    except msgspec.DecodeError as error:  # its writer was killed
        print_stderr(f"this agent has no assignment and exits: {error}")
        return 1
    stamp("agent began")
    os.chdir("/")
    adopt_orphans()
    if assignment.is_joined:
        follow_parent(signal.SIGTERM)
    try:
        agent = Agent(assignment, prefork)
    except OSError as error:  # the ranks live on, and the next agent adopts them
        print_stderr(f"this agent cannot start, the next one takes over its ranks: {error}")
        return 1
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
