"""How a training process is supervised: hello, heartbeats, SIGTERM, and permanent errors."""

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, NoReturn

from msgspec.structs import replace

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotWritable,
    OtherArithmetic,
    OtherData,
    StaleGeneration,
    UnsupportedState,
)
from muster.contracts.errors import MusterError
from muster.contracts.job.retry import REPLACED_CODE
from muster.contracts.job.status import Reason
from muster.contracts.messages.rank import (
    Heartbeat,
    Hello,
    Orphaned,
    PermanentFailure,
    Raised,
    Warned,
)
from muster.contracts.messages.wire import encodable
from muster.contracts.rank import Phase
from muster.contracts.series import Window, aggregate, joined
from muster.contracts.settings.environ import RankSettings
from muster.contracts.settings.names import HAS_JOINED
from muster.datasets.errors import (
    CacheFull,
    CacheUnusable,
    DatasetEmpty,
    DatasetMissing,
    InvalidSample,
    ShardChanged,
    ShardUnreadable,
)
from muster.objects.errors import StoreRefused
from muster.program import InvalidProgram, ProgramRaised
from muster.runtime.agent_client import RETRY_SECONDS, AgentClient
from muster.runtime.exit_report import ExitReport
from muster.runtime.redaction import Redaction
from muster.runtime.stderr_messages import print_stderr

REPORT_SECONDS: Final = 0.2
"""A step is reported at once if the last report is at least this old."""

STOP_CHECK_SECONDS: Final = 0.5
"""How often the thread checks between two heartbeats whether it should end."""

LAST_REPORT_SECONDS: Final = 5.0
"""How long an exiting process waits for a new agent, which then sees its exit."""

LAST_VALUES_SECONDS: Final = 1.0
"""How long the last heartbeat waits for another thread that is just sending one."""

MESSAGE_LIMIT: Final = 8192
"""Characters of an error that is reported: a longer message would not fit into the channel."""

_BAD_DATA: Final = (
    DatasetMissing,
    DatasetEmpty,
    ShardUnreadable,
    ShardChanged,
    InvalidSample,
    CacheFull,
    CacheUnusable,
    StoreRefused,
)
_PERMANENT: Final[Mapping[Reason, tuple[type[MusterError], ...]]] = {
    Reason.INVALID_DATASET: _BAD_DATA,
    Reason.INVALID_CHECKPOINT: (CheckpointDamaged, CheckpointMismatch, CheckpointNotWritable),
    Reason.INVALID_PROGRAM: (UnsupportedState, InvalidProgram),
    Reason.DIFFERENT_BITS: (OtherArithmetic,),
}
"""Errors that would only occur again after a restart, the last one on the same host."""

_NOT_OF_PROGRAMS: Final = {"muster", "worker", "torch", "runpy"}
"""Packages whose lines no mistake of a program is in."""

_OF_DATA: Final = (OtherData, DatasetMissing, DatasetEmpty, ShardUnreadable, ShardChanged)
"""Those of them that would not occur on a host with the data of the job."""


class Recorder:
    """Sums up the values that a rank reports, until a heartbeat has taken them along.

    It takes them in the training thread; another thread may sum them up meanwhile.
    So there is no lock, which a signal handler might find taken: `deque` is thread-safe.
    """

    def __init__(self) -> None:
        self._taken: deque[tuple[int, Mapping[str, float] | None]] = deque()
        self._step: int | None = None  # of the last value that is summed up
        self._window: Window | None = None

    def take(self, step: int, values: Mapping[str, float]) -> None:
        """Take what was reported after a step; a step before the last one: training went back."""
        self._taken.append((step, values))

    def go_to(self, step: int) -> None:
        """Note that the next values are of the steps after this one."""
        self._taken.append((step, None))

    def window(self) -> Window | None:
        """Return what was taken since the last `clear`. Not for two threads at once."""
        since = self._step
        columns: dict[str, list[float]] = {}
        while self._taken:
            step, values = self._taken.popleft()
            if since is None or self._step is None or values is None or step < self._step:
                # What could not be sent before training went back is forgotten.
                since = step if values is None else max(step - 1, 0)
                columns, self._window = {}, Window(since, since, is_back=True, values={})
            self._step = step
            for name, value in (values or {}).items():
                columns.setdefault(name, []).append(value)
        if since is not None and self._step is not None:
            found = {name: aggregate(own) for name, own in columns.items()}
            self._window = joined(
                self._window, Window(since, self._step, is_back=False, values=found)
            )
        has_news = self._window and (self._window.values or self._window.step > self._window.since)
        return self._window if has_news else None

    def clear(self) -> None:
        """Forget the last `window`: it was sent."""
        self._window = None

    def forget(self) -> None:
        """Forget everything that was taken: this is a copy of the process."""
        self._taken.clear()
        self.clear()


class Supervision:
    """One training process's side of being supervised; for the main thread.

    A thread sends heartbeats, and reconnects to the next agent when ours has died.
    """

    def __init__(
        self, client: AgentClient, settings: RankSettings, state: Callable[[bool], Heartbeat]
    ) -> None:
        """`state` returns a heartbeat, given whether the process was asked to stop."""
        self._client = client
        self.report_code: Final = client.report_code
        self.send: Final = client.send
        self.send_waiting: Final = client.send_waiting
        self._state = state
        self.recorder: Final = Recorder()
        """Takes the values that the next heartbeat sums up."""
        self._sends_values = threading.Lock()
        self._settings = settings
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._orphan_timeout_seconds = settings.orphan_timeout_seconds
        self._has_agent = settings.agent_fd is not None
        self._is_orphan = False
        self._is_over = threading.Event()
        self._next_report = 0.0
        self.is_stopping = False
        """Whether the process was asked to stop."""
        self.has_failed = False
        """Whether an error ends the process."""
        self.is_complete = False
        """Whether the program's loop has ended with everything durable."""
        self._phase = Phase.TRAINING
        self._pid = os.getpid()

    def start(self) -> None:
        """Send hello, start heartbeats, and install the SIGTERM handler and the error hook."""
        os.environ[HAS_JOINED] = "1"
        signal.signal(signal.SIGTERM, self._on_sigterm)
        os.register_at_fork(after_in_child=self.recorder.forget)
        if self._has_agent:
            os.register_at_fork(after_in_child=_leave_group)
        sys.excepthook = self._report_error
        self._client.send(Hello(python=sys.executable))
        self.report_code()
        threading.Thread(target=self._run, name="muster-heartbeat", daemon=True).start()
        atexit.register(self.report_exit)

    def report_exit(self) -> None:
        """Report that the process exits; wait a moment for a new agent if ours is gone.

        Heartbeats go on: exit handlers that were registered before this one may take their time.
        """
        if os.getpid() != self._pid:  # a fork of the program ends, with a copy of our handlers
            return
        is_finished = self.is_complete and not (self.has_failed or self.is_stopping)
        self._phase = Phase.FINISHED if is_finished else Phase.EXITING
        if self._client.is_replaced:
            self._exit_replaced()
        is_sent = self._send_state(LAST_VALUES_SECONDS)
        if is_finished:
            # A kill of all that know it does not lose what it has said last.
            with suppress(OSError):
                ExitReport(self._settings, self._client).write(0)
        if not self._is_orphan:
            deadline = time.monotonic() + LAST_REPORT_SECONDS
            while not self._client.ensure_agent():
                if time.monotonic() >= deadline:
                    return
                time.sleep(RETRY_SECONDS)
            if not is_sent:
                self._send_state(LAST_VALUES_SECONDS)

    def close(self) -> None:
        """End the thread, for tests: a real process sends heartbeats until its end."""
        self._is_over.set()

    def report(self) -> None:
        """Send the current state, unless that was done a moment ago."""
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            self._send_state()

    def report_next(self) -> None:
        """Have the next `report` sent, whenever the last one was."""
        self._next_report = 0.0

    def _run(self) -> None:
        last_seen = now = time.monotonic()
        next_beat = now + self._heartbeat_seconds
        while not self._is_over.is_set():
            self._client.wait_for_loss(max(0.0, min(next_beat - now, STOP_CHECK_SECONDS)))
            if self._is_over.is_set():
                return
            now = time.monotonic()
            if now >= next_beat:
                # Send first: the checks below read a directory, which may be on a slow network.
                next_beat = now + self._heartbeat_seconds
                self._send_state()
            if self._client.is_replaced:
                self._exit_replaced()
            if self._client.ensure_agent():
                last_seen = now
            elif now >= last_seen + self._orphan_timeout_seconds and not self._is_orphan:
                self._is_orphan = True
                by = f"itself (no agent for {self._orphan_timeout_seconds:g} s)"
                # A later agent must not count this as a preemption.
                self._client.send(Orphaned(by=by))
                # The program may have its own handler by now; an agent would send the same signal.
                os.kill(os.getpid(), signal.SIGTERM)

    def warn(self, sentence: str) -> None:
        """Write a warning to the log and to the job's events."""
        self._client.send(Warned(message=encodable(sentence)))
        print_stderr(f"muster: warning: {sentence}")

    def _send_state(self, wait_seconds: float = 0.0) -> bool:
        """Send a heartbeat, with the values that wait unless another thread sends them now.

        Return False if it could not be sent, or not with them.
        """
        state = replace(self._state(self.is_stopping), phase=self._phase)
        # A signal handler may interrupt this, and a fork may copy a lock that is taken.
        if self._sends_values.acquire(timeout=wait_seconds):
            try:
                window = self.recorder.window()
                if window is not None and self._client.send(replace(state, window=window)):
                    self.recorder.clear()
                    return True
                has_values = window is not None
            finally:
                self._sends_values.release()
            return self._client.send(state) and not has_values
        return self._client.send(state)

    def _on_sigterm(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork, such as a daemon of multiprocessing: it ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.is_stopping = True
        # Report at once: an exit code 0 from now on does not mean that the work is complete.
        self._send_state()

    def _exit_replaced(self) -> NoReturn:
        """End the process from any thread: the main thread may wait for a peer that is gone."""
        # If our own agent still receives this, the exit is not counted as a crash.
        self._client.send(Orphaned(by="itself (a newer agent's socket is there)"))
        print_stderr(
            "muster: another agent has taken over this job while this machine was suspended: this "
            "process has been replaced and exits"
        )
        os._exit(REPLACED_CODE)

    def _report_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print one sentence for an error of Muster, and report one that is permanent."""
        self.has_failed = True
        # Its peers need not wait for its threads and exit handlers.
        self._phase = Phase.EXITING
        self._send_state()
        if not isinstance(error, MusterError):
            if self.is_complete and isinstance(error, Exception):
                self._report_raised(error)
            sys.__excepthook__(kind, error, trace)
            return
        if isinstance(error, InvalidProgram) and (place := _place_in_program(trace)):
            error = InvalidProgram(f"{place}: {error}")
        # Send before printing: writing to the log may block or end the process.
        message = permanent_error(error, Redaction.of_rank(os.environ))
        if message is not None:
            self._client.send_waiting(message)
        if isinstance(error, ProgramRaised) and error.__cause__ is not None:
            cause = error.__cause__
            sys.__excepthook__(type(cause), cause, cause.__traceback__)
        print_stderr(f"muster: {error}")
        if isinstance(error, StaleGeneration):
            sys.exit(REPLACED_CODE)

    def _report_raised(self, error: Exception) -> None:
        """Report an error of the script after its loop: the same one twice will come again."""
        words = f"{type(error).__name__}: {error}".removesuffix(": ")
        sentence = f"the script raised {words} after the loop"
        sentence = encodable(Redaction.of_rank(os.environ).redact_text(sentence)[:MESSAGE_LIMIT])
        step = self._state(self.is_stopping).progress.step
        self._client.send_waiting(Raised(step=step, message=sentence))


def _place_in_program(trace: TracebackType | None) -> str:
    """Return the innermost line that is neither ours nor torch's, "" if there is none."""
    place = ""
    for frame, line in traceback.walk_tb(trace):
        if f"{frame.f_globals.get('__name__')}".partition(".")[0] not in _NOT_OF_PROGRAMS:
            place = f"{Path(frame.f_code.co_filename).name}:{line}"
    return place


def permanent_error(error: MusterError, redaction: Redaction) -> PermanentFailure | Raised | None:
    """Return how to report an error to the agent, or None if a restart may help.

    An exception of the program may be transient; the coordinator notices if it repeats.
    """
    # Redact before cutting: half of a secret would not be recognized.
    sentence = encodable(redaction.redact_text(str(error))[:MESSAGE_LIMIT])
    if isinstance(error, ProgramRaised):
        return Raised(step=error.step, message=sentence, key=error.key)
    for reason, kinds in _PERMANENT.items():
        if isinstance(error, kinds):
            of_data = isinstance(error, _OF_DATA)
            return PermanentFailure(reason=reason, message=sentence, is_of_data=of_data)
    return None


def _leave_group() -> None:
    """Let SIGTERM to the rank's process group reach the rank alone.

    It saves then, for which it may need its worker processes. They end with their parent, or with
    its containment.
    """
    with suppress(PermissionError):  # it leads a session, as after forkpty
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
