"""Exit records: written, then reported, then kept.

A coordinator that reconnects gets the last exit of every rank again, unchanged.
"""

import errno
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgspec

from muster.contracts.job.retry import SIGNAL_BASE
from muster.contracts.job.secrets import SecretUnavailable
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import RankExited, RankSaid, StartRank
from muster.contracts.messages.assignment import AdoptedRank
from muster.contracts.messages.rank import (
    ERROR_LIMIT,
    Code,
    Heartbeat,
    PermanentFailure,
    RankMessage,
)
from muster.contracts.rank import Phase
from muster.contracts.settings.paths import JobFiles
from muster.host.gpus import GpusBusy
from muster.host.limits import CGROUPS, MEMBERSHIP, cgroup_files
from muster.logs.log_file import TimeIndex
from muster.program import InvalidProgram
from muster.runtime.exit_report import (
    make_exit_record,
    read_exit_record,
    read_own_record,
    write_exit_record,
)
from muster.runtime.redaction import Redaction
from muster.runtime.stderr_messages import print_stderr
from worker.ranks.process import UNKNOWN_EXIT, ExitStatus
from worker.ranks.rank import RankProcess
from worker.ranks.start import OtherCode, is_permanent_start_error

CANNOT_START: Final = 126
"""Exit code of a rank that never became a process, as in shells."""

KILLED_IN_SHELL: Final = SIGNAL_BASE + signal.SIGKILL
"""Exit code of a shell or container whose program was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one attempt ended, and its last messages."""

    said: tuple[RankSaid, ...] = ()
    exited: RankExited

    @classmethod
    def of_failed_start(
        cls, order: StartRank, error: OSError | SecretUnavailable | InvalidProgram | OtherCode
    ) -> Self:
        """Return the exit of an attempt that did not start: refused, or to be tried again."""
        message = f"cannot be started in {order.working_dir}: {error}"
        if isinstance(error, OSError) and error.errno == errno.E2BIG:
            message += " (env and secrets are too large: pass a file's path, not its content)"
        reason = None
        busy = error if isinstance(error, GpusBusy) else None
        if busy is not None:
            message, reason = str(busy), Reason.HOST_EXHAUSTED if busy.is_final else None
        elif isinstance(error, SecretUnavailable):
            message, reason = f"cannot be started: {error}", Reason.SECRET_UNAVAILABLE
        elif isinstance(error, InvalidProgram):
            message, reason = str(error), Reason.INVALID_PROGRAM
        elif isinstance(error, OSError) and is_permanent_start_error(error, order.working_dir):
            reason = Reason.INVALID_PROGRAM
        exited = RankExited(
            rank=order.rank,
            attempt=order.attempt,
            exit_code=None if reason is None else CANNOT_START,
            signal=None,
            unstarted=message if reason is None else None,
            is_waiting=busy is not None and not busy.is_final,
            retry_after_seconds=None if busy is None else busy.retry_after_seconds,
        )
        refused: RankMessage
        if isinstance(error, OtherCode):  # the coordinator decides what it means
            refused = Code(files=error.files)
        elif reason is None:
            return cls(exited=exited)
        else:
            refused = PermanentFailure(reason=reason, message=message)
        said = RankSaid(rank=order.rank, attempt=order.attempt, message=refused)
        return cls(said=(said,), exited=exited)


class ExitLog:
    """The last exit of each rank."""

    def __init__(self, files: JobFiles, redaction: Redaction) -> None:
        self._files = files
        self._redaction = redaction
        self._last: dict[int, RankExit] = {}
        self._oom_kills = OomKills()

    def examine(self, rank: RankProcess) -> tuple[Sequence[RankSaid], ExitStatus]:
        """Return messages of an exited process that have not been reported, and how it ended.

        Its last messages may have met a full channel or no agent. Its own record holds them, and
        the exit code too if the kernel does not know it any more.
        """
        status = rank.exit_status()
        own = read_own_record(self._files, rank.rank, rank.attempt, rank.pid)
        if own is None:
            return (), status
        # The own record is redacted, so compare it with redacted messages.
        known = [self._redaction.redact(said) for said in rank.kept_messages()]
        # It may have been written when the process began to exit: what came later holds.
        is_old = any(
            isinstance(said.message, Heartbeat) and said.message.phase is not Phase.TRAINING
            for said in known
        )
        unreported = [
            said
            for said in own.said
            if said not in known
            and not (is_old and isinstance(said.message, Heartbeat))
            and rank.keep(said.message)
        ]
        if status == UNKNOWN_EXIT:
            status = ExitStatus(exit_code=own.exited.exit_code, signal=None)
        return unreported, status

    def record(self, rank: RankProcess, status: ExitStatus) -> RankExit:
        """Write the exit record, and return it."""
        lines: tuple[str, ...] = ()
        error = error_at = None
        if status.exit_code != 0:  # a clean exit needs no explanation, and there are many
            if rank.log is not None:
                lines, error_end = rank.log.last_lines(), rank.log.error_end()
                times = TimeIndex(self._files.times(rank.rank, rank.attempt))
                error_at = None if error_end is None else times.at(error_end)
            error = read_error_file(self._files.error_file(rank.rank, rank.attempt))
        if error is not None:
            # Redact before cutting: half of a secret would not be recognized.
            error = self._redaction.redact_text(error)[:ERROR_LIMIT]
        was_killed = status.signal == signal.SIGKILL or status.exit_code == KILLED_IN_SHELL
        exited = RankExited(
            rank=rank.rank,
            attempt=rank.attempt,
            exit_code=status.exit_code,
            signal=status.signal,
            last_lines=lines,
            out_of_memory=was_killed and self.claim_oom_kill(),
            error=error,
            error_at=error_at and error_at / 1e6,
        )
        recorded = RankExit(
            said=tuple(map(self._redaction.redact, rank.kept_messages())),
            exited=self._redaction.redact(exited),
        )
        try:
            record = make_exit_record(rank.pid, recorded.said, recorded.exited)
            write_exit_record(self._files, record)
        except OSError as problem:  # a full disk must not end the agent
            print_stderr(f"cannot write the exit record of rank {rank.rank}: {problem}")
        return recorded

    def claim_oom_kill(self) -> bool:
        """Return whether a process of this job has just been killed for lack of memory."""
        return self._oom_kills.claim()

    def recorded(self, adopted: AdoptedRank) -> RankExit | None:
        """Return the exit that an earlier agent has recorded, if any."""
        record = read_exit_record(self._files, adopted.rank, adopted.attempt, adopted.process)
        return None if record is None else RankExit(said=record.said, exited=record.exited)

    def keep(self, exited: RankExit) -> None:
        """Keep an exit for later coordinators."""
        self._last[exited.exited.rank] = exited

    def forget(self, rank: int) -> None:
        """Drop a rank's exit because its next attempt has started."""
        self._last.pop(rank, None)

    def has_ended(self, rank: int, attempt: int) -> bool:
        """Return whether this attempt, or a later one, has ended."""
        last = self._last.get(rank)
        return last is not None and attempt <= last.exited.attempt

    def messages(self) -> Iterator[RankSaid | RankExited]:
        """Yield what was reported of all exits."""
        for exited in self._last.values():
            yield from exited.said
            yield exited.exited


class OomKills:
    """Counts kills for lack of memory in this cgroup: SIGKILL alone is no evidence.

    Other processes of the same cgroup are counted too, so a rank that is killed at the same time
    may be blamed wrongly. Without a readable counter there is no evidence.
    """

    def __init__(self, membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> None:
        files = cgroup_files("memory.events", "memory.oom_control", membership, cgroups)
        self._file = next(files, None)
        self._claimed = self._count()

    def claim(self) -> bool:
        """Return whether there was one since the start or the last claimed one."""
        if self._count() <= self._claimed:
            return False
        self._claimed += 1
        return True

    def _count(self) -> int:
        try:
            lines = "" if self._file is None else self._file.read_text()
        except OSError:
            return 0
        words = (line.split() for line in lines.splitlines())
        return next((int(word[1]) for word in words if word[:1] == ["oom_kill"]), 0)


class _Message(msgspec.Struct):
    message: str


class _ErrorFile(msgspec.Struct):
    """The part of torch's error file that is not in the log as well."""

    message: _Message | str


def read_error_file(path: Path) -> str | None:
    """Return the error that torch's `@record` has written; None without a valid file."""
    try:
        message = msgspec.json.decode(path.read_bytes(), type=_ErrorFile).message
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    text = message if isinstance(message, str) else message.message
    return text.strip() or None
